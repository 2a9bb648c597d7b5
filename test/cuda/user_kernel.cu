// Kernels of a user's own on a SyncGroup's channel: the example of docs/kernels.md, and one with signals.
//
// nvcc -std=c++20 -shared -Xcompiler -fPIC -arch=sm_90 -cudart static -I INCLUDE_PATH user_kernel.cu -o
// libuser.so
#include <cuda_runtime.h>

#include <algorithm>
#include <exception>
#include <string>

#include "gpusync/device_handle.h"

using gpusync::DeviceHandle;

struct SumRows {
  DeviceHandle sync;
  float* parts[gpusync::kMaxRanks];  // every rank's part: float[2][world_size][capacity]
  const float* x;
  const float* bias;
  float* out;
  uint32_t n;
  uint32_t capacity;
};

/// out = the sum over all ranks of (x + bias), in one kernel: each rank writes its row to every rank, they
/// meet, and each adds up what it got.
__global__ void __launch_bounds__(256) sum_rows(const __grid_constant__ SumRows p) {
  const DeviceHandle& sync = p.sync;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t stride = gridDim.x * blockDim.x;
  // Two halves in turn: nobody writes into one that a slower rank still reads.
  const size_t half = size_t{sync.push_epoch()} * sync.world_size * p.capacity;
  for (uint32_t i = first; i < p.n; i += stride) {
    const float y = p.x[i] + p.bias[i];
    for (uint32_t r = 0; r < sync.world_size; ++r) p.parts[r][half + size_t{sync.rank} * p.capacity + i] = y;
  }
  // Block b of every rank works on the same elements, and block b is what block b waits for.
  const bool complete = sync.barrier(p.n);
  const float* mine = p.parts[sync.rank] + half;
  for (uint32_t i = first; i < p.n; i += stride) {
    float sum = complete ? 0.0f : __int_as_float(0x7fc00000);  // NaN: not a value that looks right
    for (uint32_t r = 0; complete && r < sync.world_size; ++r) sum += mine[size_t{r} * p.capacity + i];
    p.out[i] = sum;
  }
  sync.push_exit();
}

/// Waits for a number from rank `src`, adds one, and hands it on to rank `dst`.
__global__ void hand_on(const __grid_constant__ DeviceHandle sync, int* mine, int* theirs, uint32_t src,
                        uint32_t dst) {
  if (!sync.wait_signal(src)) return;
  if (threadIdx.x == 0) *theirs = *mine + 1;
  sync.signal(dst);
}

/// Null, or what is wrong.
static const char* launched() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

/// Before any rank's kernel runs: CUDA loads a kernel at its first launch, and may wait for every running
/// kernel then, also for one that waits for this rank.
extern "C" const char* load() {
  cudaFuncAttributes attributes;
  (void)cudaFuncGetAttributes(&attributes, sum_rows);
  (void)cudaFuncGetAttributes(&attributes, hand_on);
  return launched();
}

/// `parts`: SymmetricBuffer.device_pointers(). `blocks`: 0 for as many as n asks for.
extern "C" const char* launch_sum_rows(const void* handle, size_t handle_bytes, float* const* parts,
                                       const float* x, const float* bias, float* out, uint32_t n,
                                       uint32_t capacity, uint32_t blocks, cudaStream_t stream) {
  try {
    SumRows p{DeviceHandle::from_bytes(handle, handle_bytes), {}, x, bias, out, n, capacity};
    std::copy_n(parts, p.sync.world_size, p.parts);
    if (blocks == 0) blocks = std::clamp((n + 255) / 256, 1u, p.sync.max_blocks);
    sum_rows<<<blocks, 256, 0, stream>>>(p);
    return launched();
  } catch (const std::exception& error) {
    static thread_local std::string text;
    return (text = error.what()).c_str();
  }
}

extern "C" const char* launch_hand_on(const void* handle, size_t handle_bytes, int* const* parts,
                                      uint32_t src, uint32_t dst, cudaStream_t stream) {
  try {
    const DeviceHandle sync = DeviceHandle::from_bytes(handle, handle_bytes);
    hand_on<<<1, 32, 0, stream>>>(sync, parts[sync.rank], parts[dst], src, dst);
    return launched();
  } catch (const std::exception& error) {
    static thread_local std::string text;
    return (text = error.what()).c_str();
  }
}

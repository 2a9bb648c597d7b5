// What every kernel file needs.
#pragma once

#include <cstdint>

#include "check.h"
#include "gpusync/fingerprint.h"

namespace gpusync::cuda {

/// Loads a kernel now instead of at its first launch.
template <class Kernel>
void load_kernel(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "loading a kernel");
}

void preload_buffers();
void preload_collectives();
void preload_exchanges();
void preload_rms_norm();
void preload_latency();

/// What a broken group's outputs are filled with: NaN, or the integer type's maximum. Repeated over 8 bytes.
GPUSYNC_HD constexpr uint64_t poison_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 0x7fc000007fc00000u;
    case DType::kFloat64: return 0x7ff8000000000000u;
    case DType::kFloat16: return 0x7e007e007e007e00u;
    case DType::kBFloat16: return 0x7fc07fc07fc07fc0u;
    case DType::kInt32: return 0x7fffffff7fffffffu;
    case DType::kInt64: return 0x7fffffffffffffffu;
    case DType::kNone:
    case DType::kOther: break;
  }
  return ~uint64_t{0};
}

#if defined(__CUDACC__) || defined(GPUSYNC_HOST_THREADS)

/// Makes the schema's `Tensor(a!) token` true; nothing depends on the value.
__device__ __forceinline__ void touch(int32_t* token) {
  if (threadIdx.x == 0 && blockIdx.x == 0) atomicAdd(token, 1);
}

/// Fills `bytes` at `target` with `pattern`, which is repeated; a grid-stride loop.
__device__ __forceinline__ void fill_poison(char* target, uint64_t bytes, uint64_t pattern) {
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes;
       i += uint64_t{gridDim.x} * blockDim.x) {
    target[i] = static_cast<char>(pattern >> (i % 8 * 8));
  }
}

#endif

}  // namespace gpusync::cuda

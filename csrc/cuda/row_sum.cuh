// A sum over the blocks that share a row: one block, or a cluster of them, which write into one another's
// shared memory (sm_90 and later; CUDA C++ Programming Guide, "Distributed Shared Memory").
#pragma once

#include <cstdint>

namespace gpusync::cuda {

/// The most blocks of a cluster that every GPU with clusters takes.
inline constexpr uint32_t kMaxRowBlocks = 8;

#if !defined(GPUSYNC_HOST_THREADS)

/// Every rank gets the same bits: values are added in an order that depends on nothing but the number of
/// threads. These are full warps, 16 at most in each block. A block's threads have met when they have the
/// sum.
///
/// Every warp sends its part to each block, where a barrier in shared memory counts the bytes that have come.
/// The cluster's own barrier, which releases and acquires, takes longer (docs/performance_gpu.md).
class RowSum {
 public:
  /// At the kernel's beginning.
  __device__ __forceinline__ explicit RowSum(uint32_t blocks) : m_blocks(blocks) {
#if __CUDA_ARCH__ >= 900
    if (m_blocks == 1) return;
    if (threadIdx.x == 0) {
      const Shared& shared = memory();
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&shared.arrived)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&shared.arrived)),
                   "r"(parts() * uint32_t{sizeof(float)})
                   : "memory");
    }
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
  }

  /// Waits for the other blocks to begin: some time after my own has, so that it takes none.
  __device__ __forceinline__ void meet() const {
#if __CUDA_ARCH__ >= 900
    if (m_blocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
  }

  /// By all threads, once, after meet().
  __device__ __forceinline__ float operator()(float value) const {
    Shared& shared = memory();
    const uint32_t lane = threadIdx.x % 32;
    float* part = shared.parts + blockIdx.x % m_blocks * (blockDim.x / 32) + threadIdx.x / 32;
    value = of_warp(value);
#if __CUDA_ARCH__ >= 900
    if (m_blocks > 1) {
      if (lane < m_blocks) send(part, shared.arrived, lane, value);
      // Not for ever: every warp sends, be it that it has given its peers up.
      while (!has_arrived(shared.arrived)) {
      }
    } else
#endif
    {
      if (lane == 0) *part = value;
      __syncthreads();
    }
    value = 0;
    for (uint32_t i = lane; i < parts(); i += 32) value += shared.parts[i];
    return of_warp(value);
  }

 private:
  struct Shared {
    float parts[kMaxRowBlocks * 16];  // of every warp of the row's blocks
    uint64_t arrived;
  };

  __device__ __forceinline__ static Shared& memory() {
    __shared__ Shared shared;
    return shared;
  }

  __device__ __forceinline__ uint32_t parts() const { return m_blocks * (blockDim.x / 32); }

  __device__ __forceinline__ static float of_warp(float value) {
#pragma unroll
    for (uint32_t lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
  }

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ static uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }

  /// To where the cluster's block `block` has what I have here.
  __device__ __forceinline__ static uint32_t address(const void* shared, uint32_t block) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(shared)), "r"(block));
    return there;
  }

  __device__ __forceinline__ static void send(const float* target, const uint64_t& arrived, uint32_t block,
                                              float value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     address(target, block)),
                 "r"(__float_as_uint(value)), "r"(address(&arrived, block))
                 : "memory");
  }

  __device__ __forceinline__ static bool has_arrived(const uint64_t& arrived) {
    uint32_t done;
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(address(&arrived))
        : "memory");
    return done != 0;
  }
#endif

  const uint32_t m_blocks;
};

#endif

}  // namespace gpusync::cuda

// Elements of the collectives' dtypes in kernels: 16-byte packs, and reduction in fp32 for the 16-bit types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace gpusync::cuda {

template <class T>
struct Element {
  using Accumulator = T;
  __device__ static T load(T x) { return x; }
  __device__ static T store(T x) { return x; }
};

template <>
struct Element<__half> {
  using Accumulator = float;
  __device__ static float load(__half x) { return __half2float(x); }
  __device__ static __half store(float x) { return __float2half_rn(x); }
};

template <>
struct Element<__nv_bfloat16> {
  using Accumulator = float;
  __device__ static float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
};

/// What one load or store moves.
template <class T>
struct alignas(16) Pack {
  static constexpr uint32_t kItems = 16 / sizeof(T);
  T items[kItems];
};

/// For what this block reads once: without a place in L1 (docs/performance_gpu.md has what it saves).
/// Not moved across the barriers, whose accesses are volatile, too.
template <class T>
__device__ __forceinline__ Pack<T> load_once(const Pack<T>* pack) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(pack)
               : "memory");
  return *reinterpret_cast<const Pack<T>*>(&words);
}

/// Pack `index` of `numel` elements at `data`; elements beyond the end are zero.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* data, uint64_t index, uint64_t numel, bool aligned) {
  const uint64_t first = index * Pack<T>::kItems;
  if (aligned && first + Pack<T>::kItems <= numel)
    return load_once(reinterpret_cast<const Pack<T>*>(data) + index);
  Pack<T> pack;
#pragma unroll
  for (uint32_t i = 0; i < Pack<T>::kItems; ++i) pack.items[i] = first + i < numel ? data[first + i] : T{};
  return pack;
}

template <class T>
__device__ __forceinline__ void store_pack(T* data, uint64_t index, uint64_t numel, bool aligned,
                                           const Pack<T>& pack) {
  const uint64_t first = index * Pack<T>::kItems;
  if (aligned && first + Pack<T>::kItems <= numel) {
    reinterpret_cast<Pack<T>*>(data)[index] = pack;
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < Pack<T>::kItems; ++i) {
    if (first + i < numel) data[first + i] = pack.items[i];
  }
}

template <class T>
__device__ __forceinline__ bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace gpusync::cuda

// A tensor as packs of 16 bytes: loads, stores, and the loops over a thread's packs.
#pragma once

#include <cstdint>

namespace gpusync::cuda {

/// What one load or store moves.
template <class T>
struct alignas(16) Pack {
  static constexpr uint32_t kItems = 16 / sizeof(T);
  T items[kItems];
};

template <class T>
__device__ __forceinline__ uint64_t packs_of(uint64_t numel) {
  return (numel + Pack<T>::kItems - 1) / Pack<T>::kItems;
}

/// For what this block reads once: without a place in L1 (docs/performance_gpu.md has what it saves).
/// Not moved across the barriers, whose accesses are volatile, too.
template <class T>
__device__ __forceinline__ Pack<T> load_once(const Pack<T>* pack) {
#if defined(__CUDA_ARCH__)
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(pack)
               : "memory");
  return *reinterpret_cast<const Pack<T>*>(&words);
#else
  return *pack;
#endif
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

/// How many packs from the first on can be loaded and stored as such, without a look at their elements.
template <class T>
__device__ __forceinline__ uint64_t whole_packs(const T* data, uint64_t numel) {
  return is_aligned(data) ? numel / Pack<T>::kItems : 0;
}

/// So many packs at once: an argument for whose value a function is compiled.
template <uint32_t n>
struct AtOnce {};

/// The indices of this thread: threads side by side have packs side by side.
struct MyPacks {
  uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  uint64_t step = uint64_t{gridDim.x} * blockDim.x;

  /// The u-th of mine from mine of index i.
  __device__ __forceinline__ uint64_t at(uint64_t i, uint32_t u) const { return i + u * step; }

  /// Calls `some(i, AtOnce<n>)` for n of mine from i, which are below `whole`, with n = kAtOnce while there
  /// are so many, then 1; and `odd(i)` for each of the others below `end`.
  ///
  /// Without branches around them the loads of `some` are in flight together. With one that looks where the
  /// tensor ends the compiler waits for each (docs/performance_gpu.md has figures).
  template <uint32_t kAtOnce, class Some, class Odd>
  __device__ __forceinline__ void visit(uint64_t whole, uint64_t end, Some&& some, Odd&& odd) const {
    uint64_t i = first;
    for (; at(i, kAtOnce - 1) < whole; i += kAtOnce * step) some(i, AtOnce<kAtOnce>{});
    if constexpr (kAtOnce > 1) {
      for (; i < whole; i += step) some(i, AtOnce<1>{});
    }
    for (; i < end; i += step) odd(i);
  }
};

/// Copies n of my packs from `source` to `target`, from mine of index i.
template <class T, uint32_t n>
__device__ __forceinline__ void copy_packs(Pack<T>* target, const Pack<T>* source, const MyPacks& mine,
                                           uint64_t i, AtOnce<n>) {
  Pack<T> held[n];
#pragma unroll
  for (uint32_t u = 0; u < n; ++u) held[u] = load_once(source + mine.at(i, u));
#pragma unroll
  for (uint32_t u = 0; u < n; ++u) target[mine.at(i, u)] = held[u];
}

/// Packs that a thread has in flight when it copies.
inline constexpr uint32_t kCopiedAtOnce = 4;

/// Copies my packs of a tensor to where packs have their places, whatever the tensor's alignment and length.
template <class T>
__device__ __forceinline__ void copy_in(Pack<T>* target, const T* source, uint64_t numel) {
  const MyPacks mine;
  mine.visit<kCopiedAtOnce>(
      whole_packs(source, numel), packs_of<T>(numel),
      [&](uint64_t i, auto n) { copy_packs(target, reinterpret_cast<const Pack<T>*>(source), mine, i, n); },
      [&](uint64_t i) { target[i] = load_pack(source, i, numel, is_aligned(source)); });
}

}  // namespace gpusync::cuda

// What the kernels of the collectives share: reduction of packs in rank order, the count of calls, and the
// choice among instantiations.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "all_reduce.h"
#include "element.cuh"
#include "kernels.h"
#include "packs.cuh"
#include "pad.h"

namespace gpusync::cuda {

/// Reduces packs (of any width) of `T` in the order in which they are added, in fp32 for the 16-bit types,
/// rounding once.
template <class T, class P>
class Reduction {
 public:
  using E = Element<T>;
  static constexpr uint32_t kItems = P::kItems;

  __device__ __forceinline__ void first(const P& pack) {
#pragma unroll
    for (uint32_t k = 0; k < kItems; ++k) m_sum[k] = E::load(pack.items[k]);
  }

  template <bool kSum>
  __device__ __forceinline__ void add(const AllReduceParams& p, const P& pack) {
#pragma unroll
    for (uint32_t k = 0; k < kItems; ++k)
      m_sum[k] = apply<kSum>(p.reduce_op, m_sum[k], E::load(pack.items[k]));
  }

  __device__ __forceinline__ P result(const AllReduceParams& p) const {
    P pack;
#pragma unroll
    for (uint32_t k = 0; k < kItems; ++k) {
      auto value = m_sum[k];
      if constexpr (!std::is_integral_v<T>) {
        if (p.reduce_op == ReduceOp::kAvg) value *= static_cast<A>(p.scale);
      }
      pack.items[k] = E::store(value);
    }
    return pack;
  }

 private:
  using A = typename E::Accumulator;

  template <bool kSum>
  __device__ __forceinline__ static A apply(ReduceOp op, A a, A b) {
    if constexpr (kSum) return a + b;
    switch (op) {
      case ReduceOp::kMax: return b > a || b != b ? b : a;  // a NaN on either side wins
      case ReduceOp::kMin: return b < a || b != b ? b : a;
      case ReduceOp::kSum:
      case ReduceOp::kAvg: break;
    }
    return a + b;
  }

  A m_sum[kItems];
};

/// Packs of a tensor that a thread reduces at once: it has 8 of the ranks' packs in flight. With the number
/// of ranks unknown, two packs and one rank, for more cost registers (see kResidentBlocks).
template <uint32_t kRanks>
inline constexpr uint32_t kReducedAtOnce = kRanks == 0 ? 2 : 8 / kRanks;

/// Reduces n packs: `part(r, u)` loads the u-th of rank r, `store(u, result)` takes the result. With the
/// number of ranks known when compiling, all loads are in flight before the first is used; else one rank's.
template <class T, uint32_t kRanks, uint32_t n, class Part, class Store>
__device__ __forceinline__ void reduce_ranks(const AllReduceParams& p, AtOnce<n>, Part&& part,
                                             Store&& store) {
  if constexpr (kRanks != 0) {
    Pack<T> parts[n][kRanks];
#pragma unroll
    for (uint32_t u = 0; u < n; ++u)
#pragma unroll
      for (uint32_t r = 0; r < kRanks; ++r) parts[u][r] = part(r, u);
#pragma unroll
    for (uint32_t u = 0; u < n; ++u) {
      Reduction<T, Pack<T>> sum;
      sum.first(parts[u][0]);
#pragma unroll
      for (uint32_t r = 1; r < kRanks; ++r) sum.template add<true>(p, parts[u][r]);
      store(u, sum.result(p));
    }
  } else {
    Reduction<T, Pack<T>> sums[n];
#pragma unroll
    for (uint32_t u = 0; u < n; ++u) sums[u].first(part(0, u));
    for (uint32_t r = 1; r < p.pull.world_size(); ++r) {
      Pack<T> parts[n];
#pragma unroll
      for (uint32_t u = 0; u < n; ++u) parts[u] = part(r, u);
#pragma unroll
      for (uint32_t u = 0; u < n; ++u) sums[u].template add<false>(p, parts[u]);
    }
#pragma unroll
    for (uint32_t u = 0; u < n; ++u) store(u, sums[u].result(p));
  }
}

/// Reduces one pack in little code, for what lies at a tensor's ends or is not aligned: `part(r)` is rank
/// r's.
template <class T, class Part>
__device__ __forceinline__ Pack<T> reduce_odd(const AllReduceParams& p, Part&& part) {
  Pack<T> result;
  reduce_ranks<T, 0>(
      p, AtOnce<1>{}, [&](uint32_t r, uint32_t) { return part(r); },
      [&](uint32_t, const Pack<T>& pack) { result = pack; });
  return result;
}

/// What the outputs of a broken group are filled with.
template <class P>
__device__ __forceinline__ P poison(DType dtype) {
  P pack;
#pragma unroll
  for (uint32_t i = 0; i < sizeof pack / 8; ++i) reinterpret_cast<uint64_t*>(&pack)[i] = poison_of(dtype);
  return pack;
}

/// The number of finished calls. Each block has a copy, and all of them advance together (finish_call), so
/// that the blocks of a call agree on its half however many blocks the calls before had, and no block waits
/// for another.
__device__ __forceinline__ uint32_t call_number(const AllReduceParams& p) { return p.calls[blockIdx.x]; }

/// May this call stage its input? In a broken group calls do not wait for one another, and a peer may still
/// read what an earlier one has staged in the same half, for a result that is whole.
__device__ __forceinline__ bool may_stage(const AllReduceParams& p) { return !DeviceWait(p.wait).broken(); }

/// Counts the call: each block its own copy, block 0 also those of the blocks that this call does without.
/// After a block barrier that follows the last use of call_number().
__device__ __forceinline__ void finish_call(const AllReduceParams& p, uint32_t call) {
  if (threadIdx.x == 0) p.calls[blockIdx.x] = call + 1;
  if (blockIdx.x != 0) return;
  for (uint32_t b = gridDim.x + threadIdx.x; b < kMaxBlocks; b += blockDim.x) p.calls[b] = call + 1;
}

/// `Kernels<T, kRanks>::kernel` for the arguments. Unrolled over the ranks only for what models reduce all
/// the time: sums of floating-point types up to 32 bits over 2, 4 or 8 ranks.
template <template <class, uint32_t> class Kernels, class T>
auto choose_ranks(ReduceOp op, uint32_t world_size) {
  if constexpr (!std::is_integral_v<T> && sizeof(T) < 8) {
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) {
      switch (world_size) {
        case 2: return Kernels<T, 2>::kernel();
        case 4: return Kernels<T, 4>::kernel();
        case 8: return Kernels<T, 8>::kernel();
        default: break;
      }
    }
  }
  return Kernels<T, 0>::kernel();
}

template <template <class, uint32_t> class Kernels>
auto choose_kernel(DType dtype, ReduceOp op, uint32_t world_size) {
  switch (dtype) {
    case DType::kFloat32: return choose_ranks<Kernels, float>(op, world_size);
    case DType::kFloat64: return choose_ranks<Kernels, double>(op, world_size);
    case DType::kFloat16: return choose_ranks<Kernels, __half>(op, world_size);
    case DType::kBFloat16: return choose_ranks<Kernels, __nv_bfloat16>(op, world_size);
    case DType::kInt32: return choose_ranks<Kernels, int32_t>(op, world_size);
    case DType::kInt64: return choose_ranks<Kernels, int64_t>(op, world_size);
    case DType::kNone:
    case DType::kOther: break;
  }
  throw std::runtime_error("gpusync: cannot reduce this dtype");
}

}  // namespace gpusync::cuda

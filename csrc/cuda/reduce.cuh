// What the kernels of the collectives share: reduction of packs in rank order, the count of calls, and the
// choice among instantiations.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "all_reduce.h"
#include "element.cuh"
#include "kernels.h"
#include "pad.h"

namespace gpusync::cuda {

/// Reduces packs (of any width) of `T` in the order in which they are added, in fp32 for the 16-bit types,
/// rounding once.
template <class T, class P>
class Reduction {
 public:
  using E = Element<T>;
  static constexpr uint32_t kItems = P::kItems;

  __device__ __forceinline__ explicit Reduction(const AllReduceParams& p)
      : m_op(p.reduce_op), m_scale(p.scale) {}

  __device__ __forceinline__ void first(const P& pack) {
#pragma unroll
    for (uint32_t k = 0; k < kItems; ++k) m_sum[k] = E::load(pack.items[k]);
  }

  template <bool kSum>
  __device__ __forceinline__ void add(const P& pack) {
#pragma unroll
    for (uint32_t k = 0; k < kItems; ++k) m_sum[k] = apply<kSum>(m_sum[k], E::load(pack.items[k]));
  }

  __device__ __forceinline__ P result() const {
    P pack;
#pragma unroll
    for (uint32_t k = 0; k < kItems; ++k) {
      auto value = m_sum[k];
      if constexpr (!std::is_integral_v<T>) {
        if (m_op == ReduceOp::kAvg) value *= static_cast<A>(m_scale);
      }
      pack.items[k] = E::store(value);
    }
    return pack;
  }

 private:
  using A = typename E::Accumulator;

  template <bool kSum>
  __device__ __forceinline__ A apply(A a, A b) const {
    if constexpr (kSum) return a + b;
    switch (m_op) {
      case ReduceOp::kMax: return b > a || b != b ? b : a;  // a NaN on either side wins
      case ReduceOp::kMin: return b < a || b != b ? b : a;
      case ReduceOp::kSum:
      case ReduceOp::kAvg: break;
    }
    return a + b;
  }

  A m_sum[kItems];
  ReduceOp m_op;
  double m_scale;
};

/// Reduces what `part(r)` loads for every rank r. With the number of ranks known when compiling, all loads
/// are in flight before the first is used.
template <class T, uint32_t kRanks, class Part>
__device__ __forceinline__ Pack<T> reduce_ranks(const AllReduceParams& p, Part&& part) {
  Reduction<T, Pack<T>> sum(p);
  if constexpr (kRanks != 0) {
    Pack<T> parts[kRanks];
#pragma unroll
    for (uint32_t r = 0; r < kRanks; ++r) parts[r] = part(r);
    sum.first(parts[0]);
#pragma unroll
    for (uint32_t r = 1; r < kRanks; ++r) sum.template add<true>(parts[r]);
    return sum.result();
  } else {
    sum.first(part(0));
    for (uint32_t r = 1; r < p.pull.world_size(); ++r) sum.template add<false>(part(r));
    return sum.result();
  }
}

/// What the outputs of a broken group are filled with.
template <class P>
__device__ __forceinline__ P poison(DType dtype) {
  P pack;
#pragma unroll
  for (uint32_t i = 0; i < sizeof pack / 8; ++i) reinterpret_cast<uint64_t*>(&pack)[i] = poison_of(dtype);
  return pack;
}

template <class T>
__device__ __forceinline__ uint64_t packs_of(uint64_t numel) {
  return (numel + Pack<T>::kItems - 1) / Pack<T>::kItems;
}

/// The number of finished calls. Each block has a copy, and all of them advance together (finish_call), so
/// that the blocks of a call agree on its half however many blocks the calls before had, and no block waits
/// for another.
__device__ __forceinline__ uint32_t call_number(const AllReduceParams& p) { return p.calls[blockIdx.x]; }

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

// The exchanges' kernels: stage, meet, read, as in cpu/exchange.cpp.
#include "exchange.h"
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

template <class T>
__device__ __forceinline__ Pack<T>* staged_row(const ExchangeParams& p, uint32_t rank, uint64_t half,
                                               uint32_t row) {
  return reinterpret_cast<Pack<T>*>(p.area[rank] + half) + row * p.groups;
}

/// The row of my input that rank r reads.
template <class T>
__device__ __forceinline__ const T* my_input(const ExchangeParams& p, uint32_t r) {
  return static_cast<const T*>(p.input) + (p.rows != 1 ? r : 0) * p.columns;
}

/// Every pack has the same owner among the blocks wherever it is staged and read: a block waits for the
/// peers' blocks of its own index alone. Of several rows, mine is read where it lies.
template <class T>
__device__ __forceinline__ void stage(const ExchangeParams& p, uint64_t half) {
  const uint32_t rank = p.pull.rank();
  if ((p.giver != kMaxRanks && p.giver != rank) || !may_stage(p)) return;
  for (uint32_t row = 0; row < p.rows; ++row) {
    if (p.rows == 1 || row != rank) copy_in(staged_row<T>(p, rank, half, row), my_input<T>(p, row), p.numel);
  }
}

/// Pack i of rank r's row for me.
template <class T>
__device__ __forceinline__ Pack<T> piece(const ExchangeParams& p, uint64_t half, uint32_t r, uint64_t i) {
  if (r != p.pull.rank()) return load_once(staged_row<T>(p, r, half, p.my_row) + i);
  const T* input = my_input<T>(p, r);
  return load_pack(input, i, p.numel, is_aligned(input));
}

template <class T>
__global__ void __launch_bounds__(kExchangeThreads, kResidentBlocks)
    copy_kernel(const __grid_constant__ ExchangeParams p) {
  const uint32_t call = call_number(p);
  const uint64_t half = (call % kHalves) * p.half_bytes;
  stage<T>(p, half);
  const bool complete = p.pull.sync<true, true>(p.key, DeviceWait(p.wait));
  const bool one = p.giver != kMaxRanks;
  Pack<T> poison;
  reinterpret_cast<uint64_t*>(&poison)[0] = reinterpret_cast<uint64_t*>(&poison)[1] = p.poison;
  const MyPacks mine;
  for (uint32_t r = one ? p.giver : 0; r < (one ? p.giver + 1 : p.pull.world_size()); ++r) {
    T* output = static_cast<T*>(p.output) + (one ? 0 : r * p.columns);
    const T* input = my_input<T>(p, r);
    const bool own = r == p.pull.rank();
    const auto* from = own ? reinterpret_cast<const Pack<T>*>(input) : staged_row<T>(p, r, half, p.my_row);
    const uint64_t whole =
        min(whole_packs(output, p.numel), own ? whole_packs(input, p.numel) : ~uint64_t{0});
    mine.visit<kCopiedAtOnce>(
        complete ? whole : 0, p.groups,
        [&](uint64_t i, auto n) { copy_packs(reinterpret_cast<Pack<T>*>(output), from, mine, i, n); },
        [&](uint64_t i) {
          store_pack(output, i, p.numel, is_aligned(output), complete ? piece<T>(p, half, r, i) : poison);
        });
  }
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
__global__ void __launch_bounds__(kExchangeThreads, kResidentBlocks)
    reduce_kernel(const __grid_constant__ ExchangeParams p) {
  const uint32_t call = call_number(p);
  const uint64_t half = (call % kHalves) * p.half_bytes;
  stage<T>(p, half);
  const bool complete = p.pull.sync<true, true>(p.key, DeviceWait(p.wait));
  T* output = static_cast<T*>(p.output);
  const uint32_t rank = p.pull.rank();
  const T* input = my_input<T>(p, rank);
  const auto* input_packs = reinterpret_cast<const Pack<T>*>(input);
  const bool takes = p.taker == kMaxRanks || p.taker == rank;
  const uint64_t whole = min(whole_packs(output, p.numel), whole_packs(input, p.numel));
  const MyPacks mine;
  mine.visit<kReducedAtOnce<kRanks>>(
      complete && takes ? whole : 0, p.groups,
      [&](uint64_t i, auto n) {
        reduce_ranks<T, kRanks>(
            p, n,
            [&](uint32_t r, uint32_t u) {
              return load_once((r == rank ? input_packs : staged_row<T>(p, r, half, p.my_row)) +
                               mine.at(i, u));
            },
            [&](uint32_t u, const Pack<T>& result) {
              reinterpret_cast<Pack<T>*>(output)[mine.at(i, u)] = result;
            });
      },
      [&](uint64_t i) {
        Pack<T> result{};
        if (!complete) {
          result = poison<Pack<T>>(p.dtype);
        } else if (takes) {
          result = reduce_odd<T>(p, [&](uint32_t r) { return piece<T>(p, half, r, i); });
        }
        store_pack(output, i, p.numel, is_aligned(output), result);
      });
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
struct Reducing {
  static ExchangeKernel kernel() { return reduce_kernel<T, kRanks>; }
};

}  // namespace

ExchangeKernel copying(size_t item) {
  switch (item) {
    case 1: return copy_kernel<uint8_t>;
    case 2: return copy_kernel<uint16_t>;
    case 4: return copy_kernel<uint32_t>;
    default: return copy_kernel<uint64_t>;
  }
}

ExchangeKernel reducing(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<Reducing>(dtype, op, world_size);
}

}  // namespace gpusync::cuda

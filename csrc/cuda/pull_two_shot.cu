// All-reduce, pull two-shot: stage my input, meet, reduce my share of everybody's, meet again, read
// everybody's share. Moves 2 (n - 1) / n of the data to each rank instead of n - 1 times all of it, for one
// barrier more.
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

/// A pack is reduced in the block that stages it, so that a block needs to meet only its own counterparts.
/// The result takes a place in the owner's staging that none of the inputs needs. The end is fenced, for
/// peers read what was written.
template <class T, uint32_t kRanks>
__global__ void __launch_bounds__(512) pull_two_shot_kernel(const __grid_constant__ AllReduceParams p) {
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const uint32_t world_size = kRanks != 0 ? kRanks : p.pull.world_size();
  const uint32_t rank = p.pull.rank();
  const uint64_t packs = packs_of<T>(p.numel);
  // Groups of n packs, one for each rank; a thread has the same groups in every phase.
  const uint64_t groups = p.groups;
  const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint32_t call = call_number(p);
  const uint64_t half = (call % kHalves) * p.half_bytes;
  const bool input_aligned = is_aligned(input);
  const bool output_aligned = is_aligned(output);

  // Share r holds the packs that rank r reduces, one after the other, so that threads side by side touch
  // packs side by side. My own share needs no staging of my input.
  const auto staged = [&](uint32_t owner, uint64_t i) {
    return reinterpret_cast<Pack<T>*>(p.area[owner] + half) + i;
  };
  const auto for_other_shares = [&](uint64_t g, auto&& visit) {
#pragma unroll
    for (uint32_t share = 0; share < world_size; ++share) {
      const uint64_t i = share * groups + g;
      if (share != rank && i < packs) visit(share, i);
    }
  };
  constexpr uint32_t kHeld = kRanks != 0 ? kRanks : 1;  // packs in flight: loaded before the first is stored

  for (uint64_t g = first; g < groups; g += stride) {
    Pack<T> held[kHeld];
    const auto load = [&](uint32_t s, uint64_t i) {
      held[s % kHeld] = load_pack(input, i, p.numel, input_aligned);
      if constexpr (kRanks == 0) *staged(rank, i) = held[0];
    };
    for_other_shares(g, load);
    if constexpr (kRanks != 0)
      for_other_shares(g, [&](uint32_t s, uint64_t i) { *staged(rank, i) = held[s]; });
  }
  bool complete = p.pull.sync<true, true>(p.key, DeviceWait(p.wait));
  if (complete) {
    for (uint64_t g = first; g < groups; g += stride) {
      const uint64_t i = rank * groups + g;
      if (i >= packs) break;
      const auto part = [&](uint32_t r) {
        return r == rank ? load_pack(input, i, p.numel, input_aligned) : load_once(staged(r, i));
      };
      const Pack<T> result = reduce_ranks<T, kRanks>(p, part);
      *staged(rank, i) = result;
      store_pack(output, i, p.numel, output_aligned, result);
    }
    complete = p.pull.sync<true, false>(p.key, DeviceWait(p.wait));
  }
  for (uint64_t g = first; g < groups; g += stride) {
    if (!complete) {
      for (uint32_t share = 0; share < world_size; ++share) {
        store_pack(output, share * groups + g, p.numel, false, poison<Pack<T>>(p.dtype));
      }
      continue;
    }
    Pack<T> held[kHeld];
    const auto load = [&](uint32_t s, uint64_t i) {
      held[s % kHeld] = load_once(staged(s, i));
      if constexpr (kRanks == 0) store_pack(output, i, p.numel, output_aligned, held[0]);
    };
    for_other_shares(g, load);
    if constexpr (kRanks != 0) {
      for_other_shares(
          g, [&](uint32_t s, uint64_t i) { store_pack(output, i, p.numel, output_aligned, held[s]); });
    }
  }
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
struct Kernels {
  static AllReduceKernel kernel() { return pull_two_shot_kernel<T, kRanks>; }
};

}  // namespace

AllReduceKernel pull_two_shot(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<Kernels>(dtype, op, world_size);
}

}  // namespace gpusync::cuda

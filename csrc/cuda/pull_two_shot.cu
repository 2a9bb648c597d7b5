// All-reduce, pull two-shot: stage my input, meet, reduce my share of everybody's, meet again, read
// everybody's share. Moves 2 (n - 1) / n of the data to each rank instead of n - 1 times all of it, for one
// barrier more.
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

/// Shares lie by absolute pack: pack i is reduced by rank i % n, in the block that stages it, so that a block
/// needs to meet only its own counterparts. The result takes the place of the input in the owner's staging,
/// which no peer reads any more: pack i of it was read by rank i % n alone. The end is fenced, for peers read
/// what was written.
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
  const uint64_t half = (p.calls[0] % kHalves) * p.half_bytes;

  // Share r of the half holds the packs that rank r reduces, so that threads side by side touch packs side by
  // side.
  const auto pack_index = [&](uint32_t share, uint64_t group) { return share * groups + group; };
  auto* mine = reinterpret_cast<Pack<T>*>(p.area[rank] + half);
  const bool input_aligned = is_aligned(input);
  for (uint64_t g = first; g < groups; g += stride) {
    for (uint32_t share = 0; share < world_size; ++share) {
      const uint64_t i = pack_index(share, g);
      if (i < packs) mine[i] = load_pack(input, i, p.numel, input_aligned);
    }
  }
  bool complete = p.pull.sync<true, true>(p.key, DeviceWait(p.wait));
  if (complete) {
    for (uint64_t g = first; g < groups; g += stride) {
      const uint64_t i = pack_index(rank, g);
      if (i >= packs) break;
      const auto part = [&](uint32_t r) { return reinterpret_cast<const Pack<T>*>(p.area[r] + half)[i]; };
      mine[i] = reduce_ranks<T, kRanks>(p, part);
    }
    complete = p.pull.sync<true, false>(p.key, DeviceWait(p.wait));
  }
  const bool output_aligned = is_aligned(output);
  for (uint64_t g = first; g < groups; g += stride) {
    for (uint32_t share = 0; share < world_size; ++share) {
      const uint64_t i = pack_index(share, g);
      if (i >= packs) break;
      store_pack(
          output, i, p.numel, output_aligned,
          complete ? reinterpret_cast<const Pack<T>*>(p.area[share] + half)[i] : poison<Pack<T>>(p.dtype));
    }
  }
  touch(p.token);
  finish_call(p);
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

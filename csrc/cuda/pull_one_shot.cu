// All-reduce, pull one-shot: stage my input, meet, read everybody's.
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

/// Two staging halves in turn make a barrier at the end needless: half k % 2 is written again in call k + 2,
/// after the kernel of call k + 1, which has heard from blocks of every peer that started after the peer's
/// kernel k had ended.
template <class T, uint32_t kRanks>
__global__ void __launch_bounds__(512, kResidentBlocks)
    pull_one_shot_kernel(const __grid_constant__ AllReduceParams p) {
  auto* output = static_cast<T*>(p.output);
  const uint32_t call = call_number(p);
  const uint64_t half = (call % kHalves) * p.half_bytes;
  const auto staged = [&](uint32_t r) { return reinterpret_cast<Pack<T>*>(p.area[r] + half); };

  if (may_stage(p)) copy_in(staged(p.pull.rank()), static_cast<const T*>(p.input), p.numel);

  const bool complete = p.pull.sync<true, true>(p.key, DeviceWait(p.wait));

  const MyPacks mine;
  mine.visit<kReducedAtOnce<kRanks>>(
      complete ? whole_packs(output, p.numel) : 0, packs_of<T>(p.numel),
      [&](uint64_t i, auto n) {
        reduce_ranks<T, kRanks>(
            p, n, [&](uint32_t r, uint32_t u) { return load_once(staged(r) + mine.at(i, u)); },
            [&](uint32_t u, const Pack<T>& result) {
              reinterpret_cast<Pack<T>*>(output)[mine.at(i, u)] = result;
            });
      },
      [&](uint64_t i) {
        const Pack<T> result = complete
                                   ? reduce_odd<T>(p, [&](uint32_t r) { return load_once(staged(r) + i); })
                                   : poison<Pack<T>>(p.dtype);
        store_pack(output, i, p.numel, is_aligned(output), result);
      });
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
struct PullOneShot {
  static AllReduceKernel kernel() { return pull_one_shot_kernel<T, kRanks>; }
};

}  // namespace

AllReduceKernel pull_one_shot(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<PullOneShot>(dtype, op, world_size);
}

}  // namespace gpusync::cuda

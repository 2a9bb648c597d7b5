// All-reduce, pull one-shot: stage my input, meet, read everybody's.
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

/// Two staging halves in turn make a barrier at the end needless: half k % 2 is written again in call k + 2,
/// after the kernel of call k + 1, which has heard from blocks of every peer that started after the peer's
/// kernel k had ended.
template <class T, uint32_t kRanks>
__global__ void __launch_bounds__(512) pull_one_shot_kernel(const __grid_constant__ AllReduceParams p) {
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const uint64_t packs = packs_of<T>(p.numel);
  const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint32_t call = call_number(p);
  const uint64_t half = (call % kHalves) * p.half_bytes;

  auto* mine = reinterpret_cast<Pack<T>*>(p.area[p.pull.rank()] + half);
  const bool input_aligned = is_aligned(input);
  for (uint64_t i = first; i < packs; i += stride) mine[i] = load_pack(input, i, p.numel, input_aligned);

  const bool complete = p.pull.sync<true, true>(p.key, DeviceWait(p.wait));

  const bool output_aligned = is_aligned(output);
  for (uint64_t i = first; i < packs; i += stride) {
    const auto part = [&](uint32_t r) {
      return load_once(reinterpret_cast<const Pack<T>*>(p.area[r] + half) + i);
    };
    store_pack(output, i, p.numel, output_aligned,
               complete ? reduce_ranks<T, kRanks>(p, part) : poison<Pack<T>>(p.dtype));
  }
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
struct Kernels {
  static AllReduceKernel kernel() { return pull_one_shot_kernel<T, kRanks>; }
};

}  // namespace

AllReduceKernel pull_one_shot(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<Kernels>(dtype, op, world_size);
}

}  // namespace gpusync::cuda

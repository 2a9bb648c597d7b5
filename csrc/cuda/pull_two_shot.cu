// All-reduce, pull two-shot: stage my input, meet, reduce my share of everybody's, meet again, read
// everybody's share. Moves 2 (n - 1) / n of the data to each rank instead of n - 1 times all of it, for one
// barrier more.
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

/// Calls `store(share, u, load(share, u))` for n packs of every share but mine: with the number of ranks
/// known when compiling, all loads come before the first store. The next rank's share is the first, so that
/// not all ranks read from the same peer at the same time.
template <class T, uint32_t kRanks, uint32_t n, class Load, class Store>
__device__ __forceinline__ void move_other_shares(const AllReduceParams& p, AtOnce<n>, Load&& load,
                                                  Store&& store) {
  constexpr uint32_t kShares = kRanks != 0 ? kRanks - 1 : 1;  // at once
  const uint32_t world_size = kRanks != 0 ? kRanks : p.pull.world_size();
  const uint32_t next = p.pull.rank() + 1;
  const auto share = [&](uint32_t k) { return next + k < world_size ? next + k : next + k - world_size; };
  for (uint32_t first = 0; first < world_size - 1; first += kShares) {
    Pack<T> held[kShares][n];
#pragma unroll
    for (uint32_t k = 0; k < kShares; ++k)
#pragma unroll
      for (uint32_t u = 0; u < n; ++u) held[k][u] = load(share(first + k), u);
#pragma unroll
    for (uint32_t k = 0; k < kShares; ++k)
#pragma unroll
      for (uint32_t u = 0; u < n; ++u) store(share(first + k), u, held[k][u]);
  }
}

/// A pack is reduced in the block that stages it, so that a block needs to meet only its own counterparts.
/// The result takes a place in the owner's staging that none of the inputs needs. The end is fenced, for
/// peers read what was written.
///
/// Share r holds the packs that rank r reduces, one after the other, so that threads side by side touch packs
/// side by side; a thread has the same packs of all shares in every phase. My own share needs no staging of
/// my input.
template <class T, uint32_t kRanks>
__global__ void __launch_bounds__(512, kResidentBlocks)
    pull_two_shot_kernel(const __grid_constant__ AllReduceParams p) {
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const auto* input_packs = static_cast<const Pack<T>*>(p.input);
  auto* output_packs = static_cast<Pack<T>*>(p.output);
  const uint32_t world_size = kRanks != 0 ? kRanks : p.pull.world_size();
  const uint32_t rank = p.pull.rank();
  const uint64_t packs = packs_of<T>(p.numel);
  const uint32_t call = call_number(p);
  const uint64_t half = (call % kHalves) * p.half_bytes;
  const auto staged = [&](uint32_t owner, uint64_t i) {
    return reinterpret_cast<Pack<T>*>(p.area[owner] + half) + i;
  };

  const MyPacks mine;  // of a share
  constexpr uint32_t kAtOnce = kReducedAtOnce<kRanks>;
  const auto in_share = [&](uint32_t share, uint64_t g) { return share * p.groups + g; };
  // Below this, the packs of all shares are whole ones of both tensors.
  const uint64_t all_whole = min(whole_packs(input, p.numel), whole_packs(output, p.numel));
  const uint64_t before_last = in_share(world_size - 1, 0);
  const uint64_t whole = all_whole > before_last ? all_whole - before_last : 0;

  if (may_stage(p)) {
    mine.visit<kAtOnce>(
        whole, p.groups,
        [&](uint64_t g, auto n) {
          move_other_shares<T, kRanks>(
              p, n,
              [&](uint32_t share, uint32_t u) {
                return load_once(input_packs + in_share(share, mine.at(g, u)));
              },
              [&](uint32_t share, uint32_t u, const Pack<T>& pack) {
                *staged(rank, in_share(share, mine.at(g, u))) = pack;
              });
        },
        [&](uint64_t g) {
          move_other_shares<T, 0>(
              p, AtOnce<1>{},
              [&](uint32_t share, uint32_t) {
                return load_pack(input, in_share(share, g), p.numel, is_aligned(input));
              },
              [&](uint32_t share, uint32_t, const Pack<T>& pack) {
                if (in_share(share, g) < packs) *staged(rank, in_share(share, g)) = pack;
              });
        });
  }
  bool complete = p.pull.sync<true, true>(p.key, DeviceWait(p.wait));
  if (complete) {
    mine.visit<kAtOnce>(
        whole, p.groups,
        [&](uint64_t g, auto n) {
          const auto at = [&](uint32_t u) { return in_share(rank, mine.at(g, u)); };
          reduce_ranks<T, kRanks>(
              p, n,
              [&](uint32_t r, uint32_t u) {
                return load_once(r == rank ? input_packs + at(u) : staged(r, at(u)));
              },
              [&](uint32_t u, const Pack<T>& result) {
                *staged(rank, at(u)) = output_packs[at(u)] = result;
              });
        },
        [&](uint64_t g) {
          const uint64_t i = in_share(rank, g);
          if (i >= packs) return;
          const Pack<T> result = reduce_odd<T>(p, [&](uint32_t r) {
            return r == rank ? load_pack(input, i, p.numel, is_aligned(input)) : load_once(staged(r, i));
          });
          *staged(rank, i) = result;
          store_pack(output, i, p.numel, is_aligned(output), result);
        });
    complete = p.pull.sync<true, false>(p.key, DeviceWait(p.wait));
  }
  mine.visit<kAtOnce>(
      complete ? whole : 0, p.groups,
      [&](uint64_t g, auto n) {
        move_other_shares<T, kRanks>(
            p, n,
            [&](uint32_t share, uint32_t u) {
              return load_once(staged(share, in_share(share, mine.at(g, u))));
            },
            [&](uint32_t share, uint32_t u, const Pack<T>& pack) {
              output_packs[in_share(share, mine.at(g, u))] = pack;
            });
      },
      [&](uint64_t g) {
        if (!complete) {
          for (uint32_t share = 0; share < world_size; ++share)
            store_pack(output, in_share(share, g), p.numel, false, poison<Pack<T>>(p.dtype));
          return;
        }
        move_other_shares<T, 0>(
            p, AtOnce<1>{},
            [&](uint32_t share, uint32_t) {
              return in_share(share, g) < packs ? load_once(staged(share, in_share(share, g))) : Pack<T>{};
            },
            [&](uint32_t share, uint32_t, const Pack<T>& pack) {
              store_pack(output, in_share(share, g), p.numel, is_aligned(output), pack);
            });
      });
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
struct PullTwoShot {
  static AllReduceKernel kernel() { return pull_two_shot_kernel<T, kRanks>; }
};

}  // namespace

AllReduceKernel pull_two_shot(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<PullTwoShot>(dtype, op, world_size);
}

}  // namespace gpusync::cuda

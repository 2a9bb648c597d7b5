// How long a store takes until a peer sees it: two ranks bounce a number through a word in each other's
// pad. No collective uses it; it is the physical floor of the benchmark.
#include "check.h"
#include "group.h"
#include "kernels.h"

namespace gpusync::cuda {
namespace {

// In one launch, all waits together: about a second, however long the peer stays away.
constexpr uint32_t kPolls = 1u << 21;

struct PingPong {
  WaitContext wait;
  uint64_t* theirs;      // in the peer's pad
  const uint64_t* mine;  // in my own
  int32_t* token;
  int64_t* elapsed_ns;
  uint64_t first;
  uint32_t rounds;
  bool leads;
};

/// Polls for `value` while `polls` last.
template <bool kFence>
__device__ bool saw(const uint64_t* word, uint64_t value, uint32_t& polls) {
  while (observe(word) != value) {
    if (polls-- == 0) return false;
  }
  if constexpr (kFence) (void)acquire(word);
  return true;
}

/// One round more than is timed: the first waits for the peer's launch.
template <bool kFence>
__global__ void __launch_bounds__(32) ping_pong_kernel(const __grid_constant__ PingPong p) {
  touch(p.token);
  if (threadIdx.x != 0) return;
  *p.elapsed_ns = -1;
  if (!DeviceWait(p.wait).ready()) return;  // broken or closed: nothing of a peer's is touched
  uint32_t polls = kPolls;
  uint64_t start = 0;
  for (uint32_t k = 0; k <= p.rounds; ++k) {
    if (p.leads) publish<kFence>(p.theirs, p.first + k);
    if (!saw<kFence>(p.mine, p.first + k, polls)) return;
    if (!p.leads) publish<kFence>(p.theirs, p.first + k);
    if (k == 0) start = escape::now();
  }
  *p.elapsed_ns = static_cast<int64_t>(escape::now() - start);
}

}  // namespace

void preload_latency() {
  load_kernel(ping_pong_kernel<true>);
  load_kernel(ping_pong_kernel<false>);
}

void Group::ping_pong(const Launch& launch, int64_t peer, int64_t first, int64_t rounds, bool fence,
                      int64_t* elapsed_ns) {
  const uint32_t me = m_host.rank();
  const uint32_t other = m_host.checked_rank(peer);
  if (other == me || first <= 0 || rounds < 1 || rounds > kMaxPingPongRounds) {
    throw std::runtime_error("gpusync: a ping-pong needs another rank, a positive first number and 1 to " +
                             std::to_string(kMaxPingPongRounds) + " rounds");
  }
  // The words that the construction tried the mappings out with: nothing else uses them.
  const PingPong params{context(0),
                        in_pad<uint64_t>(other, m_layout.probe(me)),
                        in_pad<uint64_t>(me, m_layout.probe(other)),
                        launch.token,
                        elapsed_ns,
                        static_cast<uint64_t>(first),
                        static_cast<uint32_t>(rounds),
                        me < other};
  Turn turn(*this, 0, Kind::kSync, launch.stream);
  fence ? ping_pong_kernel<true><<<1, 32, 0, launch.stream>>>(params)
        : ping_pong_kernel<false><<<1, 32, 0, launch.stream>>>(params);
  turn.end();
}

}  // namespace gpusync::cuda

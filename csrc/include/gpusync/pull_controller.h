// Barriers around data that peers read from my memory ("pull").
#pragma once

#include "gpusync/block.h"
#include "gpusync/semaphore.h"
#include "gpusync/wait.h"

namespace gpusync {

/// A pull kernel has two synchronisation points: at its start every peer's input must be ready to be read, at
/// its end every peer must have finished reading before inputs are reused. Each point is a complete barrier
/// of all ranks on an epoch of its own, so that two starts in a row wait twice and a lone end waits once.
///
/// A wait is bounded by the `Wait` that the caller passes (wait.h says what it has to be):
/// `gpusync::cpu::Wait` for processes, `gpusync::DeviceWait` for kernels.
class PullController {
 public:
  static constexpr uint32_t kStages = 2;

  /// `rows[r]`: rank r's semaphores, kStages for each block, mapped into my address space.
  GPUSYNC_HD PullController(Semaphore* const* rows, uint32_t rank, uint32_t world_size)
      : m_rank(rank), m_world_size(world_size) {
    for (uint32_t r = 0; r < world_size; ++r) m_rows[r] = rows[r];
  }

  /// Waits until every rank has called it as often as I have. All lanes of a block call it together, and
  /// every rank runs the same number of blocks.
  ///
  /// kFence: what any rank's block wrote before is visible to all ranks' blocks after (release arrival,
  /// acquire). Without it the arrival is relaxed: nobody passes before all have arrived, but the ranks' data
  /// is ordered only as far as a kernel boundary orders it: the writes of *earlier* kernels of the arriving
  /// rank's stream. That holds on the hardware, is not promised by the PTX model, and does not hold with
  /// programmatic dependent launch. kStart: the start stage; otherwise the end stage.
  ///
  /// `fingerprint` says what this call is (fingerprint.h); a rank that passes another value is a mismatch.
  /// `Scope`: block::Together, or block::Alone in a kernel that does nothing else.
  /// Returns false on all lanes when the wait was given up: no data of a peer may be used then.
  template <bool kFence, bool kStart, class Scope = block::Together, class Wait>
  GPUSYNC_HD bool sync(uint32_t fingerprint, Wait&& wait, uint32_t index = block::index()) const {
    // Leading barrier: each lane's release carries the whole block's writes.
    Scope::barrier();
    Semaphore& mine = semaphore<kStart>(m_rank, index);
    // A lane's own copy of the epoch serves all of its peers; it is loaded beside what ready() loads.
    const Arrival arrival{mine.epoch(block::lane() % kMaxRanks) + 1, fingerprint};
    const uint64_t expected = arrival.pack();
    const bool arrived = wait.ready();
    if (arrived) arrive<kFence, kStart>(mine, expected, index, wait);
    bool complete = arrived && for_my_peers([&](uint32_t peer) { return wait.until(mine, peer, expected); });
    // Trailing barrier: without it lanes that wait for nobody would run ahead into the next stage.
    if (Scope::barrier_and(complete)) [[likely]]
      return true;

    // Everything slow comes after everything fast, so that a launch fetches the fast instructions alone.
    complete = arrived || wait.settle();
    if (complete && !arrived) arrive<kFence, kStart>(mine, expected, index, wait);
    complete = complete && for_my_peers([&](uint32_t peer) { return wait.persist(mine, peer, expected); });
    return Scope::barrier_and(complete);
  }

  /// Tells all ranks what I am calling, in the start stage, relaxed and without waiting for anybody. For
  /// calls that synchronise by their data: a wait for the data that takes too long finds here who has not
  /// come, or calls something else. The caller knows the epoch, one more than that of the call before: to
  /// load it here would hold up the block's first warp, and with it the call (docs/performance_gpu.md).
  template <class Wait>
  GPUSYNC_HD void announce(const Arrival& arrival, Wait&& wait, uint32_t index = block::index()) const {
    arrive<false, true>(semaphore<true>(m_rank, index), arrival.pack(), index, wait);
  }

  /// My own semaphore of the start stage.
  GPUSYNC_HD const Semaphore& own(uint32_t index = block::index()) const {
    return semaphore<true>(m_rank, index);
  }

  GPUSYNC_HD uint32_t rank() const { return m_rank; }
  GPUSYNC_HD uint32_t world_size() const { return m_world_size; }

 private:
  template <bool kStart>
  GPUSYNC_HD Semaphore& semaphore(uint32_t rank, uint32_t index) const {
    return m_rows[rank][index * kStages + (kStart ? 0 : 1)];
  }

  /// Does `wait_for(peer)` hold for all of my lane's peers? Leaves the loop when one does not: with a flag
  /// carried through the loop, ptxas 13.0 made some kernels for sm_90 of it that took every peer for arrived
  /// (test/test_library_code.py looks at all of them).
  template <class WaitFor>
  GPUSYNC_HD bool for_my_peers(WaitFor&& wait_for) const {
    for (uint32_t peer = block::lane(); peer < m_world_size; peer += block::lanes()) {
      if (!wait_for(peer)) return false;
    }
    return true;
  }

  template <bool kFence, bool kStart, class Wait>
  GPUSYNC_HD void arrive(Semaphore& mine, uint64_t arrival, uint32_t index, Wait&& wait) const {
    for (uint32_t peer = block::lane(); peer < m_world_size; peer += block::lanes()) {
      semaphore<kStart>(peer, index).template arrive<kFence>(m_rank, arrival);
      mine.set_epoch(peer, static_cast<uint32_t>(arrival));
      wait.notify(peer);
    }
  }

  Semaphore* m_rows[kMaxRanks] = {};
  uint32_t m_rank;
  uint32_t m_world_size;
};

}  // namespace gpusync

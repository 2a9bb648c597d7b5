// Point-to-point signals: counters that one rank adds to and another consumes from.
#pragma once

#include "gpusync/block.h"
#include "gpusync/semaphore.h"
#include "gpusync/wait.h"

namespace gpusync {

/// One rank's side of all its signals on one channel: the slots its peers signal into, and what it has sent
/// and consumed so far. The counters are monotonic; only their owner reads or writes them.
struct Mailbox {
  Semaphore inbox;
  uint32_t sent[kMaxRanks];
  uint32_t seen[kMaxRanks];
};

/// signal() never blocks and is never lost: n signals serve n waits, whichever comes first.
class SignalController {
 public:
  GPUSYNC_HD SignalController(Mailbox* const* mailboxes, uint32_t rank, uint32_t world_size)
      : m_rank(rank), m_world_size(world_size) {
    for (uint32_t r = 0; r < world_size; ++r) m_mailboxes[r] = mailboxes[r];
  }

  /// Adds one to the counter that `destination` waits on. What this block wrote before is visible to the rank
  /// that consumes the signal (release). All lanes of one block call it.
  template <class Wait>
  GPUSYNC_HD void signal(uint32_t destination, uint32_t fingerprint, Wait&& wait) const {
    block::barrier();
    if (block::lane() != 0 || !(wait.ready() || wait.settle())) return;
    const Arrival arrival{++m_mailboxes[m_rank]->sent[destination], fingerprint};
    m_mailboxes[destination]->inbox.template arrive<true>(m_rank, arrival.pack());
    wait.notify(destination);
  }

  /// Consumes one signal of `source`, waiting for it (acquire). A wait that is given up consumes nothing.
  template <class Wait>
  GPUSYNC_HD bool wait(uint32_t source, uint32_t fingerprint, Wait&& wait) const {
    Mailbox& mine = *m_mailboxes[m_rank];
    bool complete = true;
    block::barrier();
    if (block::lane() == 0) {
      const Arrival arrival{mine.seen[source] + 1, fingerprint};
      const uint64_t expected = arrival.pack();
      complete = wait.ready() && wait.until(mine.inbox, source, expected);
      if (!complete) complete = wait.settle() && wait.persist(mine.inbox, source, expected);
      if (complete) mine.seen[source] = arrival.epoch;
    }
    return block::barrier_and(complete);
  }

  GPUSYNC_HD uint32_t rank() const { return m_rank; }
  GPUSYNC_HD uint32_t world_size() const { return m_world_size; }

 private:
  Mailbox* m_mailboxes[kMaxRanks] = {};
  uint32_t m_rank;
  uint32_t m_world_size;
};

}  // namespace gpusync

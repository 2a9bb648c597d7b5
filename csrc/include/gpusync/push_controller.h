// The double buffer of data that peers write into my memory ("push").
#pragma once

#include "gpusync/block.h"

namespace gpusync {

/// In a push kernel a peer's data is itself the signal, so there is no barrier to count calls by: each block
/// counts them, in memory of its own. Call k writes and reads half k % 2. Two halves suffice as long as in
/// every call every rank receives something from every rank: nobody starts call k + 2 before it has received
/// every peer's data of call k + 1, and that was sent after the peer had finished with call k.
class PushController {
 public:
  /// `calls`: one counter for each block, in the owner's memory, zero at first.
  GPUSYNC_HD explicit PushController(uint32_t* calls) : m_calls(calls) {}

  /// The number of finished calls: monotonic (modulo 2^32), the same on all ranks, usable as a flag value.
  GPUSYNC_HD uint32_t call(uint32_t index = block::index()) const { return m_calls[index]; }

  /// The half, 0 or 1, of the call under way.
  GPUSYNC_HD uint32_t epoch(uint32_t index = block::index()) const { return call(index) % kHalves; }

  /// Ends the call: all lanes of the block call it when they have read what they came for.
  GPUSYNC_HD void exit() const {
    block::barrier();
    if (block::lane() == 0) exit_unsafe(block::index());
  }

  /// As exit(); block 0 counts also for those of `blocks` blocks that this call does without. So the blocks
  /// of a call agree on its half however many the calls before had.
  GPUSYNC_HD void exit_all(uint32_t blocks) const {
    exit();
    if (block::index() != 0) return;
    for (uint32_t b = block::count() + block::lane(); b < blocks; b += block::lanes()) exit_unsafe(b);
  }

  /// Ends the call of block `index` without a barrier: one lane, after the block has been ordered in another
  /// way.
  GPUSYNC_HD void exit_unsafe(uint32_t index) const { m_calls[index] += 1; }

 private:
  uint32_t* m_calls;
};

}  // namespace gpusync

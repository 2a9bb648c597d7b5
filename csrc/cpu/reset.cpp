// A group made usable again, in place: names, memory and addresses stay, for compiled functions and captured
// graphs hold them.
//
// The ranks meet twice, by other means than the group's (SyncGroup.reset in torch_gpusync/group.py). Between
// the meetings nobody calls anything, and each rank re-bases what it owns. Before the first, a rank may still
// be storing arrivals, which would count in the new life. Behind the second all have re-based: an arrival
// that came earlier would be wiped out. test/model/reset.pml explores it.
#include "group.h"

namespace gpusync::cpu {

bool Group::is_idle() const {
  require_own_process();
  for (std::deque<std::mutex>* mutexes : {&m_channel_mutex, &m_counter_mutex}) {
    for (std::mutex& mutex : *mutexes) {
      if (!std::unique_lock(mutex, std::try_to_lock)) return false;
    }
  }
  return m_signal_waits.load(std::memory_order_acquire) == 0;
}

void Group::rebase() {
  require_own_process();
  // A group that is whole is broken first. Should a rank die before all have re-based, then those who have do
  // not meet those who have not.
  while (failure() == nullptr) {
    give_up(Reason::kReset, CallRecord{}, 0, false, [] { return uint64_t{0}; });
  }
  m_reset_from = state();
  preset(0);
  m_skipped = 0;
  std::atomic_ref<uint32_t>(page(m_config.rank).calls).store(0, std::memory_order_relaxed);
  if (m_config.rank == 0) clear_device_failure();
}

/// The first rank moves the state; the others find it moved. A plain store of a late one would wipe out a
/// break that has happened since.
void Group::revive() {
  require_own_process();
  move_state(m_reset_from, State::make(m_reset_from.generation() + 1, 0, Phase::kOk));
}

void Group::clear_device_failure() {
  std::atomic_ref<uint32_t>(group_page().device_failure.reason).store(0, std::memory_order_release);
}

}  // namespace gpusync::cpu

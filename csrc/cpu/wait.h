// The bounded wait of one call on the CPU: spin, then yield, then sleep; and its three ways out besides
// arrival.
#pragma once

#include <chrono>
#include <optional>

#include "group.h"

namespace gpusync::cpu {

/// The `Wait` that controllers are given. Spinning serves ranks that run side by side, yielding serves more
/// ranks than cores (the rank that is waited for gets the core), and sleeping on a futex serves peers that
/// are late.
///
/// No wake-up is lost: the publisher stores its slot and then reads `sleepers`; the sleeper raises `sleepers`
/// and then reads the slot; all four are sequentially consistent, so at least one of the two sees the other.
class Wait {
 public:
  /// `awaited`: mask of the ranks whose arrival the call needs, for the error message.
  Wait(Group& group, const CallRecord& call, uint64_t awaited)
      : m_group(group), m_call(call), m_awaited(awaited) {}

  // Group::begin() has looked at the group's state before, agreed() looks after.
  bool ready() const { return true; }
  bool settle() const { return true; }
  void notify(uint32_t peer) { m_group.ring_doorbell(peer); }

  bool until(const Semaphore& mine, uint32_t peer, uint64_t expected) {
    for (int spin = m_group.spins(); spin >= 0; --spin) {
      const uint64_t seen = mine.peek(peer);
      if (reached(seen, expected)) {
        if (compare(seen, expected) == Seen::kMismatch) return false;
        mine.acquire_from(peer);
        return true;
      }
      relax();
    }
    return false;
  }

  bool persist(const Semaphore& mine, uint32_t peer, uint64_t expected);

  /// Call it when all that was waited for has come: a rank must not go on from a call that a peer has given
  /// up.
  bool agreed() { return m_group.state().phase() == Phase::kOk || m_group.settle(m_call); }

 private:
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  bool sleep_until(const Semaphore& mine, uint32_t peer, uint64_t expected);
  bool is_hopeless(const Semaphore& mine, uint32_t peer, uint64_t expected);
  uint64_t missing(const Semaphore& mine, uint64_t expected) const;

  Group& m_group;
  const CallRecord& m_call;
  uint64_t m_awaited;
  unsigned m_interrupts = InterruptCounter::count();             // when the call began
  uint32_t m_probe = 0;                                          // whom is_hopeless() looks at next
  std::optional<std::chrono::steady_clock::time_point> m_start;  // of the first slow wait of this call
};

template <class Body>
void Group::synchronize(CallRecord call, uint64_t awaited, Body&& body) {
  begin(call);
  Wait wait(*this, call, awaited);
  if (!body(wait) || !wait.agreed()) throw_broken(call);
}

}  // namespace gpusync::cpu

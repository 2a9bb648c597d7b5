#include "wait.h"

#include <sched.h>

#include <algorithm>

#include "futex.h"

namespace gpusync::cpu {
namespace {

constexpr int kYields = 20;

// The longest sleep: what a wait has to notice by itself (SIGINT taken by another thread, a new timeout, a
// peer that is gone) it notices within this time.
constexpr double kNap = 0.05;

/// Raises `sleepers` of my page for as long as I may sleep.
class Sleeper {
 public:
  explicit Sleeper(RankPage& page) : m_sleepers(page.sleepers) {
    m_sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() { m_sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  std::atomic_ref<uint32_t> m_sleepers;
};

/// Tells what I wait for, for as long as I may sleep.
class Teller {
 public:
  Teller(Group& group, const Semaphore& mine, uint64_t expected, uint64_t ranks) : m_group(group) {
    m_group.tell_awaiting(&mine, expected, ranks);
  }
  ~Teller() { m_group.tell_awaiting(nullptr, 0, 0); }
  Teller(const Teller&) = delete;
  Teller& operator=(const Teller&) = delete;

 private:
  Group& m_group;
};

}  // namespace

bool Wait::persist(const Semaphore& mine, uint32_t peer, uint64_t expected) {
  if (!m_start) m_start = std::chrono::steady_clock::now();
  for (int i = 0; i < kYields; ++i) {
    switch (compare(mine.acquire_from(peer), expected)) {
      case Seen::kArrived: return true;
      case Seen::kMismatch: return sleep_until(mine, peer, expected);
      case Seen::kNotYet: sched_yield();
    }
  }
  return sleep_until(mine, peer, expected);
}

bool Wait::sleep_until(const Semaphore& mine, uint32_t peer, uint64_t expected) {
  RankPage& page = m_group.page(m_group.rank());
  InterruptCounter::renew();
  const Sleeper sleeper(page);
  const Teller teller(m_group, mine, expected, m_awaited);
  for (;;) {
    const uint32_t event = std::atomic_ref<uint32_t>(page.event).load(std::memory_order_seq_cst);
    const Seen seen = compare(mine.acquire_from(peer), expected);
    if (seen == Seen::kArrived) return true;
    if (m_group.state().phase() != Phase::kOk && !m_group.settle(m_call)) return false;

    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - *m_start;
    const double left = m_group.timeout() - waited.count();
    Reason reason = Reason::kNone;
    if (seen == Seen::kMismatch) {
      reason = Reason::kMismatch;
    } else if (InterruptCounter::count() != m_interrupts) {
      reason = Reason::kInterrupted;
    } else if (left <= 0 || is_hopeless(mine, peer, expected)) {
      reason = Reason::kTimeout;
    }
    if (reason != Reason::kNone) {
      switch (m_group.give_up(reason, m_call, waited.count(), left <= 0,
                              [&] { return missing(mine, expected); })) {
        case Group::Verdict::kComplete: return true;
        case Group::Verdict::kBroken: return false;
        case Group::Verdict::kRetry: break;
      }
    }
    if (left > 0) {
      futex_wait(&page.event, event, std::min(left, kNap));
    }
  }
}

/// Is a rank gone that I wait for? I wait for them in turn; every nap looks at the one whose turn it is and
/// at one of the others, so that none ends unnoticed for more naps than there are ranks.
bool Wait::is_hopeless(const Semaphore& mine, uint32_t peer, uint64_t expected) {
  if (m_group.is_gone(peer)) return true;
  const uint32_t other = m_probe++ % m_group.world_size();
  return (m_awaited >> other & 1) != 0 && compare(mine.acquire_from(other), expected) == Seen::kNotYet &&
         m_group.is_gone(other);
}

/// A rank that arrives stores one slot after the other. A peer whose slot came first may have passed already,
/// before the state said that a decision is under way; so an arrival in any rank's row counts, and nobody
/// gives up what another has passed. (It is an arrival like any other: its loads acquire.)
uint64_t Wait::missing(const Semaphore& mine, uint64_t expected) const {
  const bool meeting = m_awaited == m_group.all_ranks();  // else a signal, meant for me alone
  const auto* const base = reinterpret_cast<const char*>(&m_group.page(m_group.rank()));
  uint64_t mask = 0;
  for (uint32_t r = 0; r < m_group.world_size(); ++r) {
    const uint64_t bit = uint64_t{1} << r;
    if ((m_awaited & bit) == 0) continue;
    bool come = compare(mine.acquire_from(r), expected) != Seen::kNotYet;
    for (uint32_t owner = 0; meeting && !come && owner < m_group.world_size(); ++owner) {
      const ptrdiff_t distance = reinterpret_cast<const char*>(&m_group.page(owner)) - base;
      const auto& row = *reinterpret_cast<const Semaphore*>(reinterpret_cast<const char*>(&mine) + distance);
      come = compare(row.acquire_from(r), expected) == Seen::kArrived;
    }
    if (!come) mask |= bit;
  }
  return mask;
}

}  // namespace gpusync::cpu

// The bounded wait of kernels: poll, look at the clock now and then, and leave a record instead of hanging or
// trapping.
//
// Every rank's pad has a status word. A wait that expires claims the decision in rank 0's pad, tells all
// ranks that it is deciding, and gives late ranks time to show up; then either the group lives on, or it is
// broken for everybody: waits end, kernels return at once, and the host finds the record in memory that all
// ranks' hosts share. Should the deciding rank die, the first to lose patience takes the decision over.
// test/model/device.pml explores it.
//
// It compiles for the host as well, for its tests: there are no kernels that need it there.
#pragma once

#include "gpusync/block.h"
#include "gpusync/semaphore.h"
#include "gpusync/wait.h"

#if !defined(__CUDA_ARCH__)
#include <atomic>
#include <chrono>
#endif

namespace gpusync {

enum class DeviceStatus : uint32_t { kWhole = 0, kDeciding = 1, kBroken = 2 };

enum class DeviceReason : uint32_t { kNone = 0, kTimeout = 1, kMismatch = 2, kBadOffset = 3, kBadGrid = 4 };

/// Why a group broke on the device: in host memory that is mapped into every rank's device. `reason` is
/// written last.
struct DeviceFailure {
  uint32_t reason;   // DeviceReason; not kNone: the record is complete
  uint32_t rank;     // who reports
  uint64_t missing;  // mask of the ranks that had not come
  uint64_t waited_ns;
  uint32_t epoch;
  uint32_t fingerprint;
  uint32_t channel;
  uint32_t block;
  uint64_t seen[kMaxRanks];  // every rank's slot: what it announced last
};

/// Where a wait turns when it expires. In device memory, so that kernel parameters stay small.
struct WaitEscape {
  uint32_t* claim;              // in rank 0's pad: 0, or 1 + the rank that decides
  uint32_t* status[kMaxRanks];  // every rank's pad
  DeviceFailure* failure;       // host memory
  const uint64_t* timeout_ns;   // host memory: a new timeout holds for captured graphs too
  const uint64_t* gone;         // host memory: mask of the ranks that have closed the group
  uint32_t rank;
  uint32_t world_size;
};

/// The part of a wait that is the same in every launch: a kernel parameter.
struct WaitContext {
  uint32_t* status;  // of my own pad
  const WaitEscape* escape;
  uint32_t channel;
  uint32_t reserved = 0;  // no padding: handles (device_handle.h) are compared, and show nothing of the stack
};

/// The slow half of a wait.
namespace escape {

// Polls before a wait looks at clock and status: about 2 ms on an H200, where one takes half a microsecond.
// A host thread gives way at each.
#if defined(__CUDA_ARCH__)
inline constexpr uint32_t kPollsBetweenChecks = 4096;
#else
inline constexpr uint32_t kPollsBetweenChecks = 64;
#endif
// How long the deciding rank waits for arrivals that were under way when it announced its decision: longer
// than any time slice in which a peer's kernel may be held between looking at its status word and arriving.
inline constexpr uint64_t kGraceNs = 100'000'000;
// A decision that takes longer is one whose rank has died.
inline constexpr uint64_t kDecisionLimitNs = 800'000'000;

GPUSYNC_HD uint64_t now() {
#if defined(__CUDA_ARCH__)
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#else
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(time).count());
#endif
}

GPUSYNC_HD uint32_t load(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(std::memory_order_relaxed);
#endif
}

/// From host memory: what the hosts may change at any time.
GPUSYNC_HD uint64_t host_word(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile uint64_t*>(word);
#else
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_relaxed);
#endif
}

GPUSYNC_HD void store(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
#endif
}

/// Changes the word; false, and nothing has changed, if it is not `from`.
GPUSYNC_HD bool move(uint32_t* word, uint32_t from, uint32_t to) {
#if defined(__CUDA_ARCH__)
  uint32_t before;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(word), "r"(from), "r"(to)
               : "memory");
  return before == from;
#else
  return std::atomic_ref<uint32_t>(*word).compare_exchange_strong(from, to, std::memory_order_acq_rel);
#endif
}

GPUSYNC_HD bool move_claim(const WaitEscape& group, uint32_t from, uint32_t to) {
  return move(group.claim, from, to);
}

GPUSYNC_HD DeviceStatus status(const uint32_t* word) { return static_cast<DeviceStatus>(load(word)); }

/// Tells all ranks of a decision that is under way, or that it has ended well. For a rank whose status is not
/// `from` nothing changes: one that has closed the group finds it broken for good, because graphs that it
/// captured may be replayed at any time, and must not touch what is gone.
GPUSYNC_HD void announce(const WaitEscape& group, DeviceStatus from, DeviceStatus to) {
  for (uint32_t r = 0; r < group.world_size; ++r)
    move(group.status[r], static_cast<uint32_t>(from), static_cast<uint32_t>(to));
}

GPUSYNC_HD void announce_broken(const WaitEscape& group) {
  for (uint32_t r = 0; r < group.world_size; ++r)
    store(group.status[r], static_cast<uint32_t>(DeviceStatus::kBroken));
}

/// `mine`: null where the call has no slots to show; `expected`: 0 where it is not known.
GPUSYNC_HD void write_failure(const WaitContext& context, DeviceReason reason, uint64_t missing,
                              uint64_t waited, uint64_t expected, const Semaphore* mine) {
  const WaitEscape& group = *context.escape;
  DeviceFailure* failure = group.failure;
  failure->rank = group.rank;
  failure->missing = missing;
  failure->waited_ns = waited;
  failure->epoch = static_cast<uint32_t>(expected);
  failure->fingerprint = static_cast<uint32_t>(expected >> 32);
  failure->channel = context.channel;
  failure->block = block::index();
  for (uint32_t r = 0; r < group.world_size; ++r) failure->seen[r] = mine != nullptr ? mine->peek(r) : 0;
  store(&failure->reason, static_cast<uint32_t>(reason));
}

/// Waits for a decision under way, and takes it over when its rank has died in the middle; true: the group is
/// whole. `expired`: my wait has expired and somebody else has the claim, who may not have told me yet, or
/// may never.
GPUSYNC_HD bool settle(const WaitContext& context, bool expired = false, uint64_t expected = 0,
                       const Semaphore* mine = nullptr) {
  DeviceStatus s = status(context.status);
  if (s == DeviceStatus::kBroken) return false;
  if (s == DeviceStatus::kWhole && !expired) return true;
  const WaitEscape& group = *context.escape;
  uint32_t decider = load(group.claim);
  uint64_t start = now();
  for (;;) {
    block::relax();
    s = status(context.status);
    if (s == DeviceStatus::kBroken) return false;
    const uint32_t claim = load(group.claim);
    if (s == DeviceStatus::kWhole && (!expired || claim == 0)) return true;
    const uint64_t time = now();
    if (claim != decider) {  // another decision, or another's: it has its own time
      decider = claim;
      start = time;
    }
    if (time - start <= kDecisionLimitNs || !move_claim(group, decider, 1 + group.rank)) continue;
    // It may have died between its record and telling everybody.
    if (load(&group.failure->reason) == static_cast<uint32_t>(DeviceReason::kNone)) {
      const uint64_t missing = decider != 0 ? uint64_t{1} << (decider - 1) : 0;
      write_failure(context, DeviceReason::kTimeout, missing, time - start, expected, mine);
    }
    announce_broken(group);
    return false;
  }
}

/// The claim is mine: gives late ranks their time, and decides. False: a peer has taken the decision over.
/// `whole` is what was decided.
template <class Missing>
GPUSYNC_HD bool decide(const WaitContext& context, const Semaphore& mine, uint64_t expected, bool mismatch,
                       uint64_t waited, bool& whole, Missing&& missing) {
  const WaitEscape& group = *context.escape;
  const uint64_t time = now();
  announce(group, DeviceStatus::kWhole, DeviceStatus::kDeciding);
  if (!mismatch) {
    while (now() - time < kGraceNs) block::relax();
  }
  const uint64_t absent = missing();
  // One that was held up for most of a second between this look and telling everybody would still tell them
  // of a whole group that its peers have given up: no rank is, whose GPU works.
  if (load(group.claim) != 1 + group.rank) return false;
  whole = !mismatch && absent == 0;
  if (whole) {
    announce(group, DeviceStatus::kDeciding, DeviceStatus::kWhole);
    store(group.claim, 0);
  } else {
    write_failure(context, mismatch ? DeviceReason::kMismatch : DeviceReason::kTimeout, absent, waited,
                  expected, &mine);
    announce_broken(group);
  }
  return true;
}

/// Is a wait that began at `start` still worth it? False: the group is broken, by this wait or by another.
/// `missing()` tells, as a mask, which ranks have not come.
template <class Missing>
GPUSYNC_HD bool go_on(const WaitContext& context, const Semaphore& mine, uint64_t expected, bool mismatch,
                      uint64_t start, Missing&& missing) {
  const WaitEscape& group = *context.escape;
  bool whole = status(context.status) == DeviceStatus::kWhole;
  if (whole) {
    const uint64_t waited = now() - start;
    const bool expired = waited >= host_word(group.timeout_ns);
    // Before its time a wait ends for a rank that has closed the group: all that it had launched has run by
    // then.
    const uint64_t blamed = expired ? ~uint64_t{0} : host_word(group.gone);
    if (!mismatch && !expired && (blamed == 0 || (missing() & blamed) == 0)) return true;
    if (move_claim(group, 0, 1 + group.rank) &&
        decide(context, mine, expected, mismatch, waited, whole, [&] { return missing() & blamed; })) {
      return whole;  // and find the arrival at the next poll
    }
  }
  return settle(context, whole, expected, &mine);
}

/// Breaks the group for another reason than a wait.
GPUSYNC_HD void fail(const WaitContext& context, DeviceReason reason, uint32_t fingerprint) {
  for (;;) {
    if (move_claim(*context.escape, 0, 1 + context.escape->rank)) {
      write_failure(context, reason, 0, 0, Arrival{0, fingerprint}.pack(), nullptr);
      announce_broken(*context.escape);
      return;
    }
    if (!settle(context, true)) return;  // broken by another; a decision for a whole group is waited for
  }
}

}  // namespace escape

/// The `Wait` that controllers are given in kernels: one for each lane, made in the kernel.
class DeviceWait {
 public:
  /// `awaited`: mask of the ranks whose arrival the call needs, for the error message.
  GPUSYNC_HD explicit DeviceWait(const WaitContext& context, uint64_t awaited = ~uint64_t{0})
      : m_context(context), m_awaited(awaited) {}

  /// Looked at before arriving, so that a rank which comes after its peers gave up neither waits nor passes.
  GPUSYNC_HD bool ready() const { return escape::status(m_context.status) == DeviceStatus::kWhole; }

  /// Is the group broken, as far as this rank knows? Its calls have stopped waiting then, and must not write
  /// to what a slower peer may still read.
  GPUSYNC_HD bool broken() const { return escape::status(m_context.status) == DeviceStatus::kBroken; }

  GPUSYNC_HD void notify(uint32_t) const {}

  /// One load and one comparison a turn; clock and status are left to persist().
  GPUSYNC_HD bool until(const Semaphore& mine, uint32_t peer, uint64_t expected) const {
    if (poll(mine, peer, expected) != Seen::kArrived) return false;
    mine.acquire_from(peer);
    return true;
  }

  GPUSYNC_HD bool settle() const { return escape::settle(m_context); }

  GPUSYNC_HD bool persist(const Semaphore& mine, uint32_t peer, uint64_t expected) const {
    const uint64_t start = escape::now();
    for (;;) {
      const Seen seen = poll(mine, peer, expected);
      if (seen == Seen::kArrived) break;
      const auto missing = [&] {
        uint64_t mask = 0;
        for (uint32_t r = 0; r < m_context.escape->world_size; ++r) {
          if (!reached(mine.peek(r), expected)) mask |= uint64_t{1} << r;
        }
        return mask & m_awaited;
      };
      if (!escape::go_on(m_context, mine, expected, seen == Seen::kMismatch, start, missing)) return false;
    }
    mine.acquire_from(peer);
    return true;
  }

  /// Breaks the group for another reason than a wait.
  GPUSYNC_HD void fail(DeviceReason reason, uint32_t fingerprint) const {
    escape::fail(m_context, reason, fingerprint);
  }

 private:
  GPUSYNC_HD static Seen poll(const Semaphore& mine, uint32_t peer, uint64_t expected) {
    uint64_t seen = mine.peek(peer);
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (uint32_t polls = 0; !reached(seen, expected) && polls < escape::kPollsBetweenChecks; ++polls) {
      block::relax();
      seen = mine.peek(peer);
    }
    return compare(seen, expected);
  }

  const WaitContext& m_context;
  const uint64_t m_awaited;
};

}  // namespace gpusync

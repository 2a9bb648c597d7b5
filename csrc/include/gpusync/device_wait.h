// The bounded wait of kernels: poll, look at the clock now and then, and leave a record instead of hanging or
// trapping.
//
// Every rank's pad has a status word. A wait that expires claims the decision in rank 0's pad, tells all
// ranks that it is deciding, and gives late ranks time to show up; then either the group lives on, or it is
// broken for everybody: waits end, kernels return at once, and the host finds the record in memory that all
// ranks' hosts share.
#pragma once

#include "gpusync/block.h"
#include "gpusync/semaphore.h"
#include "gpusync/wait.h"

namespace gpusync {

enum class DeviceStatus : uint32_t { kWhole = 0, kDeciding = 1, kBroken = 2 };

enum class DeviceReason : uint32_t { kNone = 0, kTimeout = 1, kMismatch = 2, kBadOffset = 3 };

/// Why a group broke on the device: in host memory that is mapped into every rank's device. Written once,
/// `reason` last.
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
  uint32_t rank;
  uint32_t world_size;
};

/// The part of a wait that is the same in every launch: a kernel parameter.
struct WaitContext {
  uint32_t* status;  // of my own pad
  const WaitEscape* escape;
  uint32_t channel;
};

#if defined(__CUDACC__)

/// The slow half of a wait.
namespace escape {

// How long the deciding rank waits for arrivals that were under way when it announced its decision: longer
// than any time slice in which a peer's kernel may be held between looking at its status word and arriving.
inline constexpr uint64_t kGraceNs = 100'000'000;
// A decision that takes longer is one whose rank has died.
inline constexpr uint64_t kDecisionLimitNs = 800'000'000;

__device__ __forceinline__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ DeviceStatus status(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return static_cast<DeviceStatus>(value);
}

__device__ __forceinline__ void store(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void announce(const WaitEscape& group, DeviceStatus status) {
  for (uint32_t r = 0; r < group.world_size; ++r) store(group.status[r], static_cast<uint32_t>(status));
}

/// The one who changes the claim from 0 decides.
__device__ __forceinline__ bool claim(const WaitEscape& group) {
  uint32_t before;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(group.claim), "r"(0u), "r"(1 + group.rank)
               : "memory");
  return before == 0;
}

__device__ __forceinline__ void write_failure(const WaitContext& context, DeviceReason reason,
                                              uint64_t missing, uint64_t waited, uint64_t expected,
                                              const Semaphore* mine) {
  const WaitEscape& group = *context.escape;
  volatile DeviceFailure* failure = group.failure;
  failure->rank = group.rank;
  failure->missing = missing;
  failure->waited_ns = waited;
  failure->epoch = static_cast<uint32_t>(expected);
  failure->fingerprint = static_cast<uint32_t>(expected >> 32);
  failure->channel = context.channel;
  failure->block = block::index();
  for (uint32_t r = 0; r < group.world_size; ++r) failure->seen[r] = mine != nullptr ? mine->peek(r) : 0;
  store(const_cast<uint32_t*>(&failure->reason), static_cast<uint32_t>(reason));
}

/// Waits for a decision under way; true: the group is whole.
__device__ __forceinline__ bool settle(const WaitContext& context) {
  const uint64_t start = now();
  for (;;) {
    const DeviceStatus s = status(context.status);
    if (s != DeviceStatus::kDeciding) return s == DeviceStatus::kWhole;
    if (now() - start > kDecisionLimitNs) {
      store(context.status, static_cast<uint32_t>(DeviceStatus::kBroken));
      return false;
    }
  }
}

/// Is a wait that began at `start` still worth it? False: the group is broken, by this wait or by another.
/// `missing()` tells, as a mask, which ranks have not come.
template <class Missing>
__device__ __forceinline__ bool go_on(const WaitContext& context, const Semaphore& mine, uint64_t expected,
                                      bool mismatch, uint64_t start, Missing&& missing) {
  const DeviceStatus s = status(context.status);
  if (s != DeviceStatus::kWhole) return s == DeviceStatus::kDeciding && settle(context);
  const WaitEscape& group = *context.escape;
  const uint64_t time = now();
  const uint64_t waited = time - start;
  if (!mismatch && waited < *static_cast<const volatile uint64_t*>(group.timeout_ns)) return true;
  if (!claim(group)) return settle(context);
  announce(group, DeviceStatus::kDeciding);
  if (!mismatch) {
    while (now() - time < kGraceNs) {
    }
  }
  const uint64_t absent = missing();
  if (!mismatch && absent == 0) {
    announce(group, DeviceStatus::kWhole);
    store(group.claim, 0);
    return true;  // and find the arrival at the next poll
  }
  write_failure(context, mismatch ? DeviceReason::kMismatch : DeviceReason::kTimeout, absent, waited,
                expected, &mine);
  announce(group, DeviceStatus::kBroken);
  return false;
}

/// Breaks the group for another reason than a wait.
__device__ __forceinline__ void fail(const WaitContext& context, DeviceReason reason, uint32_t fingerprint) {
  if (!claim(*context.escape)) return;
  write_failure(context, reason, 0, 0, Arrival{0, fingerprint}.pack(), nullptr);
  announce(*context.escape, DeviceStatus::kBroken);
}

}  // namespace escape

/// The `Wait` that controllers are given in kernels: one for each lane, made in the kernel.
class DeviceWait {
 public:
  /// `awaited`: mask of the ranks whose arrival the call needs, for the error message.
  __device__ __forceinline__ explicit DeviceWait(const WaitContext& context, uint64_t awaited = ~uint64_t{0})
      : m_context(context), m_awaited(awaited) {}

  /// Looked at before arriving, so that a rank which comes after its peers gave up neither waits nor passes.
  __device__ __forceinline__ bool ready() const {
    return escape::status(m_context.status) == DeviceStatus::kWhole;
  }

  __device__ __forceinline__ void notify(uint32_t) const {}

  /// One load and one comparison a turn; clock and status are left to persist().
  __device__ __forceinline__ bool until(const Semaphore& mine, uint32_t peer, uint64_t expected) const {
    if (poll(mine, peer, expected) != Seen::kArrived) return false;
    mine.acquire_from(peer);
    return true;
  }

  __device__ __forceinline__ bool settle() const { return escape::settle(m_context); }

  __device__ __forceinline__ bool persist(const Semaphore& mine, uint32_t peer, uint64_t expected) const {
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
  __device__ __forceinline__ void fail(DeviceReason reason, uint32_t fingerprint) const {
    escape::fail(m_context, reason, fingerprint);
  }

 private:
  // About 2 ms on an H200: a poll takes half a microsecond.
  static constexpr uint32_t kPollsBetweenChecks = 4096;

  __device__ __forceinline__ static Seen poll(const Semaphore& mine, uint32_t peer, uint64_t expected) {
    uint64_t seen = mine.peek(peer);
#pragma unroll 1
    for (uint32_t polls = 0; !reached(seen, expected) && polls < kPollsBetweenChecks; ++polls)
      seen = mine.peek(peer);
    return compare(seen, expected);
  }

  const WaitContext& m_context;
  const uint64_t m_awaited;
};

#endif  // __CUDACC__

}  // namespace gpusync

// The bounded wait of kernels: poll, look at the clock now and then, and leave a record instead of hanging or trapping.
//
// Every rank's pad has a status word. A wait that expires claims the decision in rank 0's pad, tells all ranks that it
// is deciding, and gives late ranks time to show up; then either the group lives on, or it is broken for everybody:
// waits end, kernels return at once, and the host finds the record in memory that all ranks' hosts share.
#pragma once

#include "gpusync/block.h"
#include "gpusync/semaphore.h"

namespace gpusync {

enum class DeviceStatus : uint32_t { kWhole = 0, kDeciding = 1, kBroken = 2 };

enum class DeviceReason : uint32_t { kNone = 0, kTimeout = 1, kMismatch = 2, kBadOffset = 3 };

/// Why a group broke on the device: in host memory that is mapped into every rank's device. Written once, `reason` last.
struct DeviceFailure {
  uint32_t reason;  // DeviceReason; not kNone: the record is complete
  uint32_t rank;    // who reports
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
  uint32_t* claim;               // in rank 0's pad: 0, or 1 + the rank that decides
  uint32_t* status[kMaxRanks];   // every rank's pad
  DeviceFailure* failure;        // host memory
  const uint64_t* timeout_ns;    // host memory: a new timeout holds for captured graphs too
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

/// The `Wait` that controllers are given in kernels: one for each lane, made in the kernel.
class DeviceWait {
 public:
  __device__ __forceinline__ explicit DeviceWait(const WaitContext& context) : m_context(context) {}

  /// May this call take part at all? Looked at before arriving, so that a rank which comes after its peers gave up
  /// neither waits nor passes. The load is in flight together with that of the epoch.
  __device__ __forceinline__ bool ready() const { return status() == DeviceStatus::kWhole || settle(); }

  __device__ __forceinline__ void notify(uint32_t) const {}

  __device__ __forceinline__ bool until(const Semaphore& mine, uint32_t peer, uint64_t expected) {
    for (;;) {
      // The loop that every wait runs: one load, one comparison. Clock and status are off this path.
      uint64_t seen = mine.peek(peer);
#pragma unroll 1
      for (uint32_t polls = 0; !reached(seen, expected) && polls < kPollsBetweenChecks; ++polls) seen = mine.peek(peer);
      const Seen verdict = compare(seen, expected);
      if (verdict == Seen::kArrived) {
        mine.acquire_from(peer);
        return true;
      }
      if (!go_on(mine, expected, verdict == Seen::kMismatch)) return false;
    }
  }

  /// Breaks the group for another reason than a wait.
  __device__ __forceinline__ void fail(DeviceReason reason, uint32_t fingerprint) {
    const WaitEscape& escape = *m_context.escape;
    if (claim(escape) != 0) return;
    write_failure(escape, reason, 0, 0, Arrival{0, fingerprint}.pack());
    announce(escape, DeviceStatus::kBroken);
  }

 private:
  // About 2 ms on an H200: a poll takes half a microsecond.
  static constexpr uint32_t kPollsBetweenChecks = 4096;
  // How long the deciding rank waits for arrivals that were under way when it announced its decision: longer than any
  // time slice in which a peer's kernel may be held between looking at its status word and arriving.
  static constexpr uint64_t kGraceNs = 100'000'000;
  // A decision that takes longer is one whose rank has died.
  static constexpr uint64_t kDecisionLimitNs = 800'000'000;

  __device__ __forceinline__ static uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  }

  __device__ __forceinline__ static uint32_t load(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }

  __device__ __forceinline__ static void store(uint32_t* word, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }

  /// The one who changes the claim from 0 decides; tells what it was before.
  __device__ __forceinline__ static uint32_t claim(const WaitEscape& escape) {
    uint32_t before;
    asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(escape.claim), "r"(0u), "r"(1 + escape.rank)
                 : "memory");
    return before;
  }

  __device__ __forceinline__ DeviceStatus status() const { return static_cast<DeviceStatus>(load(m_context.status)); }

  /// Waits for a decision under way; true: the group is whole.
  __device__ __forceinline__ bool settle() const {
    const uint64_t start = now();
    for (;;) {
      const DeviceStatus s = status();
      if (s != DeviceStatus::kDeciding) return s == DeviceStatus::kWhole;
      if (now() - start > kDecisionLimitNs) {
        store(m_context.status, static_cast<uint32_t>(DeviceStatus::kBroken));
        return false;
      }
    }
  }

  __device__ __forceinline__ static void announce(const WaitEscape& escape, DeviceStatus status) {
    for (uint32_t r = 0; r < escape.world_size; ++r) store(escape.status[r], static_cast<uint32_t>(status));
  }

  /// Off the fast path: is this wait still worth it? False: the group is broken.
  __device__ __forceinline__ bool go_on(const Semaphore& mine, uint64_t expected, bool mismatch) {
    const uint64_t time = now();
    if (m_start == 0) m_start = time;
    const DeviceStatus s = status();
    if (s != DeviceStatus::kWhole) return s == DeviceStatus::kDeciding && settle();
    const WaitEscape& escape = *m_context.escape;
    const uint64_t waited = time - m_start;
    if (!mismatch && waited < *reinterpret_cast<const volatile uint64_t*>(escape.timeout_ns)) return true;
    if (claim(escape) != 0) return settle();
    announce(escape, DeviceStatus::kDeciding);
    if (!mismatch) {
      while (now() - time < kGraceNs) {
      }
    }
    uint64_t missing = 0;
    for (uint32_t r = 0; r < escape.world_size; ++r) {
      if (compare(mine.peek(r), expected) == Seen::kNotYet) missing |= uint64_t{1} << r;
    }
    if (!mismatch && missing == 0) {
      announce(escape, DeviceStatus::kWhole);
      store(escape.claim, 0);
      return true;  // and find the arrival at the next poll
    }
    write_failure(escape, mismatch ? DeviceReason::kMismatch : DeviceReason::kTimeout, missing, waited, expected, &mine);
    announce(escape, DeviceStatus::kBroken);
    return false;
  }

  __device__ __forceinline__ void write_failure(const WaitEscape& escape, DeviceReason reason, uint64_t missing,
                                                uint64_t waited, uint64_t expected, const Semaphore* mine = nullptr) {
    volatile DeviceFailure* failure = escape.failure;
    failure->rank = escape.rank;
    failure->missing = missing;
    failure->waited_ns = waited;
    failure->epoch = static_cast<uint32_t>(expected);
    failure->fingerprint = static_cast<uint32_t>(expected >> 32);
    failure->channel = m_context.channel;
    failure->block = block::index();
    for (uint32_t r = 0; r < escape.world_size; ++r) failure->seen[r] = mine != nullptr ? mine->peek(r) : 0;
    store(const_cast<uint32_t*>(&failure->reason), static_cast<uint32_t>(reason));
  }

  const WaitContext& m_context;
  uint64_t m_start = 0;
};

#endif  // __CUDACC__

}  // namespace gpusync

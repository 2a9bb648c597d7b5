// Workload on the wait that kernels use, as the host's threads: what cannot be made to happen on a GPU at
// will.
#include <algorithm>
#include <cstring>

#include "gpusync/device_handle.h"
#include "stress.h"

namespace stress {
namespace {

using gpusync::DeviceFailure;
using gpusync::DeviceHandle;
using gpusync::DeviceReason;
using gpusync::DeviceStatus;
using gpusync::Mailbox;
using gpusync::PullController;
using gpusync::PushController;
using gpusync::Semaphore;
using gpusync::WaitContext;
using gpusync::WaitEscape;
namespace escape = gpusync::escape;

/// What a rank's pad holds; and, in rank 0's, what the hosts share.
struct Pad {
  Semaphore semaphores[PullController::kStages];
  Mailbox mailbox;
  uint32_t push_calls[2];
  alignas(gpusync::kLineBytes) uint32_t status;
  alignas(gpusync::kLineBytes) uint32_t claim;
  alignas(gpusync::kLineBytes) uint64_t timeout_ns;
  uint64_t gone;
  uint64_t word[3];  // from the rank before this one
  DeviceFailure failure;
};
static_assert(sizeof(Pad) + alignof(Pad) <= Rank::kBoardWords * sizeof(uint64_t));

Pad& pad(const Rank& rank, uint32_t owner) {
  const auto address = reinterpret_cast<uintptr_t>(rank.board(owner));
  return *reinterpret_cast<Pad*>((address + alignof(Pad) - 1) / alignof(Pad) * alignof(Pad));
}

/// One rank's kernels, on a handle that has been bytes, as a user's are.
class Kernels {
 public:
  explicit Kernels(const Rank& rank)
      : m_handle(make_handle(rank, {&pad(rank, rank.id()).status, &m_escape, 7})) {
    Pad& shared = pad(rank, 0);
    m_escape.claim = &shared.claim;
    for (uint32_t r = 0; r < rank.ranks(); ++r) m_escape.status[r] = &pad(rank, r).status;
    m_escape.failure = &shared.failure;
    m_escape.timeout_ns = &shared.timeout_ns;
    m_escape.gone = &shared.gone;
    m_escape.rank = rank.id();
    m_escape.world_size = rank.ranks();
  }

  bool barrier(uint32_t key = 1) { return m_handle.barrier(key); }
  /// A wait has expired, and whoever was missing comes in time. Returns what was decided.
  bool decide_well() {
    bool whole = false;
    return escape::move_claim(m_escape, 0, 1 + m_escape.rank) &&
           escape::decide(m_handle.wait, m_handle.pull.own(), 1, false, 1, whole,
                          [] { return uint64_t{0}; }) &&
           whole;
  }
  DeviceStatus status() const { return escape::status(m_handle.wait.status); }
  const DeviceHandle& handle() const { return m_handle; }
  const WaitEscape& group() const { return m_escape; }

 private:
  static DeviceHandle make_handle(const Rank& rank, WaitContext context) {
    Semaphore* rows[gpusync::kMaxRanks];
    Mailbox* mailboxes[gpusync::kMaxRanks];
    for (uint32_t r = 0; r < rank.ranks(); ++r) {
      rows[r] = pad(rank, r).semaphores;
      mailboxes[r] = &pad(rank, r).mailbox;
    }
    const DeviceHandle made{DeviceHandle::kVersion,
                            sizeof(DeviceHandle),
                            rank.id(),
                            rank.ranks(),
                            2,
                            0,
                            context,
                            {rows, rank.id(), rank.ranks()},
                            {mailboxes, rank.id(), rank.ranks()},
                            PushController(pad(rank, rank.id()).push_calls)};
    char bytes[sizeof made + 1];
    char* odd = bytes + 1;  // bytes of Python's may lie anywhere
    std::memcpy(odd, &made, sizeof made);
    return DeviceHandle::from_bytes(odd, sizeof made);
  }

  WaitEscape m_escape{};
  DeviceHandle m_handle;
};

// A key of up to 19 bits is what messages show, and a larger one still differs from it.
static_assert(gpusync::key_of(gpusync::user_key(4096, 128, true)) == 4096);
static_assert(gpusync::blocks_of(gpusync::user_key(~0u, 128, false)) == 128);
static_assert(gpusync::op_of(gpusync::user_key(~0u, 128, true)) == gpusync::Op::kUser);
static_assert(gpusync::user_key(1, 1, true) != gpusync::user_key(1 | 1u << 30, 1, true));

/// What is no handle, or one of another library's, is refused.
void refuse(const Rank& rank, const DeviceHandle& handle) {
  const auto expect_refusal = [&](const void* data, size_t size, const char* what) {
    try {
      DeviceHandle::from_bytes(data, size);
    } catch (const std::runtime_error&) {
      return;
    }
    rank.fail("a handle %s was accepted", what);
  };
  DeviceHandle other = handle;
  expect_refusal(&other, 0, "of no bytes");
  expect_refusal(&other, sizeof other - 1, "that lacks a byte");
  other.version += 1;
  expect_refusal(&other, sizeof other, "of another version");
  other = handle;
  other.bytes += 8;
  expect_refusal(&other, sizeof other, "of another size");
}

/// A message around the ring, and two turns of the double buffer.
void pass_signals(const Rank& rank, const DeviceHandle& handle) {
  const uint32_t next = (rank.id() + 1) % rank.ranks();
  const uint32_t previous = (rank.id() + rank.ranks() - 1) % rank.ranks();
  Pad& mine = pad(rank, rank.id());
  for (uint32_t k = 0; k < 3; ++k) {
    rank.expect(handle.push_epoch(), k % 2, "the half", rank.id());
    // Block 0 counts for a block that has not run, too.
    rank.expect(mine.push_calls[1], k, "the other block's count", rank.id());
    pad(rank, next).word[k] = 100 * k + rank.id();
    handle.signal(next);
    if (!handle.wait_signal(previous)) rank.fail("a signal was given up");
    rank.expect(mine.word[k], 100 * k + previous, "the message", previous);
    handle.push_exit();
  }
}

enum Scene : uint32_t {
  kAllCome,          // one of them late, but in time
  kNeverComes,       // and then too late
  kDiesUnannounced,  // with the claim, and nobody told
  kDiesHalfway,      // some were told
  kDiesRecorded,     // the record is written, and nobody told
  kCloses,           // behind a barrier that all pass
  kCallsAnother,
  kHasClosed,  // and peers decide later that a wait of theirs may go on
  kScenes,
};

}  // namespace

/// Barriers with the wait of kernels: one rank is late, never comes, dies while it decides, closes the group,
/// or calls something else. The others pass or give up together, and the record says why. Last, one has
/// closed the group, and a decision of its peers must not bring its kernels back to life.
void kernels(Rank& rank) {
  constexpr uint64_t kMs = 1'000'000;
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    const auto scene = static_cast<Scene>(k % kScenes);
    const auto odd = static_cast<uint32_t>((k + k / kScenes) % rank.ranks());
    const bool is_odd = rank.id() == odd;
    const uint64_t bit = uint64_t{1} << odd;
    const bool patient = scene == kAllCome || scene == kCloses || scene == kCallsAnother;
    std::memset(static_cast<void*>(&pad(rank, rank.id())), 0, sizeof(Pad));
    pad(rank, rank.id()).timeout_ns = (patient ? 10'000 : 30) * kMs;
    rank.meet();
    Kernels mine(rank);
    const WaitEscape& group = mine.group();
    const double start = Rank::seconds();
    bool passed = true;
    switch (scene) {
      case kAllCome:
        if (is_odd) Rank::spin_until(start + 0.05);
        refuse(rank, mine.handle());
        pass_signals(rank, mine.handle());
        passed = mine.barrier() && mine.handle().pull_start(2) && mine.handle().pull_end<true>(3);
        break;
      case kNeverComes:
        if (!is_odd) passed = mine.barrier();
        rank.meet();
        if (is_odd) passed = mine.barrier();
        break;
      case kDiesUnannounced:
      case kDiesHalfway:
      case kDiesRecorded:
        if (is_odd) {
          if (!escape::move_claim(group, 0, 1 + odd)) rank.fail("somebody decides before the timeout");
          const uint32_t told = scene == kDiesHalfway ? 1 + static_cast<uint32_t>(k) % rank.ranks() : 0;
          for (uint32_t r = 0; r < told; ++r)
            escape::store(group.status[r], static_cast<uint32_t>(DeviceStatus::kDeciding));
          if (scene == kDiesRecorded) {
            const WaitContext context{group.status[odd], &group, 7};
            escape::write_failure(context, DeviceReason::kTimeout, bit, 1, 1, nullptr);
          }
          passed = false;
        }
        rank.meet();
        if (!is_odd) passed = mine.barrier();
        break;
      case kCloses:
        passed = mine.barrier();
        if (!passed) rank.fail("the barrier before the close was given up");
        // A rank that is held up in this barrier may find the group broken by the next.
        rank.meet();
        if (is_odd) {
          std::atomic_ref<uint64_t>(pad(rank, 0).gone).fetch_or(bit);
          passed = false;
        } else {
          passed = mine.barrier();
        }
        break;
      case kCallsAnother: passed = mine.barrier(is_odd ? 2 : 1); break;
      case kHasClosed:
        if (is_odd) escape::store(group.status[odd], static_cast<uint32_t>(DeviceStatus::kBroken));
        rank.meet();
        if (rank.id() == (odd + 1) % rank.ranks() && !mine.decide_well()) rank.fail("it was decided badly");
        rank.meet();
        passed = false;
        break;
      case kScenes: break;
    }
    if (passed != (scene == kAllCome)) rank.fail("scene %u was %s", scene, passed ? "passed" : "given up");
    if (Rank::seconds() - start > 8) rank.fail("scene %u took too long", scene);
    rank.meet();

    const DeviceFailure& failure = *group.failure;
    const auto reason = static_cast<DeviceReason>(escape::load(&failure.reason));
    const DeviceReason wanted = scene == kAllCome || scene == kHasClosed ? DeviceReason::kNone
                                : scene == kCallsAnother                 ? DeviceReason::kMismatch
                                                                         : DeviceReason::kTimeout;
    if (reason != wanted) {
      rank.fail("scene %u left the reason %u instead of %u", scene, static_cast<uint32_t>(reason),
                static_cast<uint32_t>(wanted));
    }
    if (wanted == DeviceReason::kTimeout) rank.expect(failure.missing, bit, "the missing rank", failure.rank);
    const bool broken = mine.status() == DeviceStatus::kBroken;
    const bool breaks = scene == kHasClosed ? is_odd : scene != kAllCome;
    if (broken != breaks) rank.fail("scene %u left the wrong status", scene);
    if (broken && mine.barrier()) rank.fail("a barrier of a broken group was passed");
    if (rank.id() == 0) rank.count(scene == kAllCome ? 0 : 1);
    rank.meet();
  }
}

}  // namespace stress

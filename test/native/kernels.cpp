// Workload on the wait that kernels use, as the host's threads: what cannot be made to happen on a GPU at
// will.
#include <algorithm>
#include <cstring>

#include "gpusync/device_wait.h"
#include "gpusync/pull_controller.h"
#include "stress.h"

namespace stress {
namespace {

using gpusync::DeviceFailure;
using gpusync::DeviceReason;
using gpusync::DeviceStatus;
using gpusync::DeviceWait;
using gpusync::PullController;
using gpusync::Semaphore;
using gpusync::WaitContext;
using gpusync::WaitEscape;
namespace escape = gpusync::escape;

/// What a rank's pad holds; and, in rank 0's, what the hosts share.
struct Pad {
  Semaphore semaphores[PullController::kStages];
  alignas(gpusync::kLineBytes) uint32_t status;
  alignas(gpusync::kLineBytes) uint32_t claim;
  alignas(gpusync::kLineBytes) uint64_t timeout_ns;
  uint64_t gone;
  DeviceFailure failure;
};
static_assert(sizeof(Pad) + alignof(Pad) <= Rank::kBoardWords * sizeof(uint64_t));

Pad& pad(const Rank& rank, uint32_t owner) {
  const auto address = reinterpret_cast<uintptr_t>(rank.board(owner));
  return *reinterpret_cast<Pad*>((address + alignof(Pad) - 1) / alignof(Pad) * alignof(Pad));
}

/// One rank's kernels.
class Kernels {
 public:
  explicit Kernels(const Rank& rank) : m_pull(make_pull(rank)) {
    Pad& shared = pad(rank, 0);
    m_escape.claim = &shared.claim;
    for (uint32_t r = 0; r < rank.ranks(); ++r) m_escape.status[r] = &pad(rank, r).status;
    m_escape.failure = &shared.failure;
    m_escape.timeout_ns = &shared.timeout_ns;
    m_escape.gone = &shared.gone;
    m_escape.rank = rank.id();
    m_escape.world_size = rank.ranks();
    m_context = {m_escape.status[rank.id()], &m_escape, 7};
  }

  bool barrier(uint32_t fingerprint = 1) {
    return m_pull.sync<true, true>(fingerprint, DeviceWait(m_context));
  }
  /// A wait has expired, and whoever was missing comes in time. Returns what was decided.
  bool decide_well() {
    bool whole = false;
    return escape::move_claim(m_escape, 0, 1 + m_escape.rank) &&
           escape::decide(m_context, m_pull.own(), 1, false, 1, whole, [] { return uint64_t{0}; }) && whole;
  }
  DeviceStatus status() const { return escape::status(m_context.status); }
  const WaitEscape& group() const { return m_escape; }

 private:
  static PullController make_pull(const Rank& rank) {
    Semaphore* rows[gpusync::kMaxRanks];
    for (uint32_t r = 0; r < rank.ranks(); ++r) rows[r] = pad(rank, r).semaphores;
    return {rows, rank.id(), rank.ranks()};
  }

  PullController m_pull;
  WaitEscape m_escape{};
  WaitContext m_context{};
};

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
        passed = mine.barrier() && mine.barrier();
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

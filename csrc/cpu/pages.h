// What one group's shared memory holds, from its first byte: the group's page, then for each rank its page
// and its channels, then the staging halves. All of it is zero when the ranks map it, and only ever used
// through Group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "call_record.h"
#include "gpusync/device_wait.h"
#include "gpusync/semaphore.h"
#include "gpusync/signal_controller.h"

namespace gpusync::cpu {

/// The group's state word: phase in the low byte, then the deciding rank, then the generation that reset()
/// advances. kOk -> kDeciding (by the first rank whose wait expires) -> kBroken, or back to kOk when its
/// peers had come after all.
enum class Phase : uint32_t { kOk = 0, kDeciding = 1, kBroken = 2 };

struct State {
  uint32_t word;

  static State make(uint32_t generation, uint32_t rank, Phase phase) {
    return {generation << 16 | rank << 8 | static_cast<uint32_t>(phase)};
  }
  Phase phase() const { return static_cast<Phase>(word & 0xff); }
  uint32_t rank() const { return word >> 8 & 0xff; }
  uint32_t generation() const { return word >> 16; }
  State with(uint32_t rank, Phase phase) const { return make(generation(), rank, phase); }
};

enum class Reason : uint32_t {
  kNone,
  kTimeout,
  kMismatch,
  kInterrupted,
  kBadOffset,
  kReset,
  kCrossed,
  kBadGrid,
};

/// Why the group is broken: written by a rank that decides so, before it moves the state to kBroken. The
/// state names the rank whose record counts: one that was stopped while it decided may come back and still
/// write its own.
struct FailureRecord {
  Reason reason;
  uint32_t rank;     // whose call it was
  uint64_t missing;  // mask of the ranks that did not come
  uint64_t waited_us;
  CallRecord call;              // of the reporting rank
  CallRecord calls[kMaxRanks];  // every rank's last call at that moment
  char text[12288];             // zero-terminated
};

struct GroupPage {
  alignas(kLineBytes) uint32_t state;
  // For kernels of ranks on GPUs, which read the one and write the other.
  alignas(kLineBytes) uint64_t gone;  // mask of the ranks that have closed the group
  alignas(kLineBytes) DeviceFailure device_failure;
};

/// What a rank sleeps for: its peers look when their own waits expire.
struct Awaiting {
  uint64_t semaphore;  // its own, in bytes from the group's first; 0: it waits for nothing
  uint64_t expected;   // the arrival, as Wait compares it
  uint64_t ranks;      // mask
};

struct RankPage {
  // Doorbell: the rank sleeps on `event` after raising `sleepers`.
  alignas(kLineBytes) uint32_t event;
  uint32_t sleepers;
  // Who it is; written when it opens the group.
  alignas(kLineBytes) int32_t pid;
  int32_t global_rank;
  char host[64];
  alignas(kLineBytes) uint64_t timeout_ns;
  Awaiting awaiting;
  // What it called.
  alignas(kLineBytes) uint32_t calls;
  alignas(kLineBytes) CallRing ring;
  alignas(kLineBytes) FailureRecord failure;
};

struct Channel {
  Semaphore stages[2];
  Mailbox mailbox;
  alignas(kLineBytes) uint32_t push_calls;
};

/// Byte offsets of it all.
class Layout {
 public:
  Layout(uint32_t world_size, uint32_t channels, size_t staging_bytes)
      : m_channels(channels + 1),
        m_rank_bytes(sizeof(RankPage) + m_channels * sizeof(Channel)),
        m_staging(round_up(sizeof(GroupPage) + world_size * m_rank_bytes, kPage)),
        m_half(round_up(std::max<size_t>(staging_bytes / kHalves, 1), kPage)),
        m_world_size(world_size) {}

  size_t rank_page(uint32_t rank) const { return sizeof(GroupPage) + rank * m_rank_bytes; }
  /// Channel `channels`, one beyond the user's, belongs to the collectives.
  size_t channel(uint32_t rank, uint32_t channel) const {
    return rank_page(rank) + sizeof(RankPage) + channel * sizeof(Channel);
  }
  size_t staging(uint32_t rank, uint32_t half) const { return m_staging + (rank * kHalves + half) * m_half; }
  size_t half_bytes() const { return m_half; }
  size_t total_bytes() const { return staging(m_world_size, 0); }

 private:
  static constexpr size_t kPage = 4096;
  size_t m_channels;
  size_t m_rank_bytes;
  size_t m_staging;
  size_t m_half;
  uint32_t m_world_size;
};

}  // namespace gpusync::cpu

// What one rank's peer-mapped device memory holds, from its first byte. Zero before its address is given
// away.
#pragma once

#include <algorithm>

#include "gpusync/pull_controller.h"
#include "gpusync/signal_controller.h"

namespace gpusync::cuda {

/// Thread blocks that one call may use at most, each with semaphores of its own.
inline constexpr uint32_t kMaxBlocks = 128;

class PadLayout {
 public:
  PadLayout(uint32_t channels, size_t staging_bytes)
      : m_channels(channels + 1),
        m_half(round_up(std::max(staging_bytes / kHalves, kSmallestHalf), kLineBytes)) {}

  /// Status word and, in rank 0's pad, the claim to decide: a line each.
  size_t status() const { return 0; }
  size_t claim() const { return kLineBytes; }
  /// One word for each peer: where the construction tries every mapping out.
  size_t probe(uint32_t source) const { return 2 * kLineBytes + source * sizeof(uint64_t); }
  /// Channel `channels`, one beyond the user's, belongs to the collectives.
  size_t semaphores(uint32_t channel) const { return kHead + channel * kChannel; }
  size_t mailbox(uint32_t channel) const { return semaphores(channel) + kSemaphores; }
  size_t push_calls(uint32_t channel) const { return mailbox(channel) + sizeof(Mailbox); }
  size_t staging(uint32_t half) const { return kHead + m_channels * kChannel + half * m_half; }
  /// Where peers push to. Apart from the staging: what looks like a flag here must never have been data.
  size_t push_area() const { return staging(kHalves); }
  size_t half_bytes() const { return m_half; }
  size_t total_bytes() const { return push_area() + kHalves * m_half; }

 private:
  // 16 bytes from each of as many ranks as there may be.
  static constexpr size_t kSmallestHalf = kMaxRanks * 16;
  static constexpr size_t kHead = 2 * kLineBytes + round_up(kMaxRanks * sizeof(uint64_t), kLineBytes);
  static constexpr size_t kSemaphores = sizeof(Semaphore) * PullController::kStages * kMaxBlocks;
  static constexpr size_t kChannel =
      kSemaphores + sizeof(Mailbox) + round_up(kMaxBlocks * sizeof(uint32_t), kLineBytes);

  size_t m_channels;
  size_t m_half;
};

}  // namespace gpusync::cuda

// Barriers, stages, signals and the push double buffer: one controller call each.
#include "wait.h"

namespace gpusync::cpu {
namespace {

uint32_t key(Op op, bool fence = false) { return fingerprint({.op = op, .fence = fence}); }

class WaitUnderWay {
 public:
  explicit WaitUnderWay(std::atomic<uint32_t>& count) : m_count(count) {
    m_count.fetch_add(1, std::memory_order_relaxed);
  }
  ~WaitUnderWay() { m_count.fetch_sub(1, std::memory_order_release); }
  WaitUnderWay(const WaitUnderWay&) = delete;
  WaitUnderWay& operator=(const WaitUnderWay&) = delete;

 private:
  std::atomic<uint32_t>& m_count;
};

}  // namespace

uint32_t Group::checked_channel(int64_t channel) const {
  if (channel < 0 || channel >= m_config.channels) {
    throw std::runtime_error("gpusync: channel " + std::to_string(channel) + " is out of range: group '" +
                             m_config.name + "' has channels 0 to " + std::to_string(m_config.channels - 1) +
                             " (SyncGroup(channels=...) makes more)");
  }
  return static_cast<uint32_t>(channel);
}

uint32_t Group::checked_rank(int64_t rank) const {
  if (rank < 0 || rank >= m_config.world_size) {
    throw std::runtime_error("gpusync: rank " + std::to_string(rank) + " is out of range: group '" +
                             m_config.name + "' has ranks 0 to " + std::to_string(m_config.world_size - 1) +
                             " (ranks are ranks in the group, not global ones)");
  }
  return static_cast<uint32_t>(rank);
}

void Group::barrier(int64_t channel, bool fence) {
  const uint32_t c = checked_channel(channel);
  const auto turn = take_turn(m_channel_mutex[c]);
  synchronize(record(Op::kBarrier, c, fence), all_ranks(), [&](Wait& wait) {
    return fence ? m_pull[c].sync<true, true>(key(Op::kBarrier, true), wait)
                 : m_pull[c].sync<false, true>(key(Op::kBarrier), wait);
  });
}

void Group::pull_start(int64_t channel) {
  const uint32_t c = checked_channel(channel);
  const auto turn = take_turn(m_channel_mutex[c]);
  synchronize(record(Op::kPullStart, c), all_ranks(),
              [&](Wait& wait) { return m_pull[c].sync<false, true>(key(Op::kPullStart), wait); });
}

void Group::pull_end(int64_t channel, bool fence) {
  const uint32_t c = checked_channel(channel);
  const auto turn = take_turn(m_channel_mutex[c]);
  synchronize(record(Op::kPullEnd, c, fence), all_ranks(), [&](Wait& wait) {
    return fence ? m_pull[c].sync<true, false>(key(Op::kPullEnd, true), wait)
                 : m_pull[c].sync<false, false>(key(Op::kPullEnd), wait);
  });
}

void Group::signal(int64_t destination, int64_t channel) {
  const uint32_t c = checked_channel(channel);
  const uint32_t dst = checked_rank(destination);
  const auto turn = take_turn(m_counter_mutex[c]);
  CallRecord call = record(Op::kSignal, c, false, dst);
  begin(call);
  m_signal[c].signal(dst, key(Op::kSignal), Wait(*this, call, 0));
}

void Group::wait_signal(int64_t source, int64_t channel) {
  const uint32_t c = checked_channel(channel);
  const uint32_t src = checked_rank(source);
  // The turn is not kept over the wait: another thread of this rank may have to send the signal that lets its
  // peer send this one. Waits for one source on one channel from two threads at once are for the user to
  // order. What is under way is counted, for is_idle().
  const WaitUnderWay counted(m_signal_waits);
  synchronize(record(Op::kWaitSignal, c, false, src), uint64_t{1} << src,
              [&](Wait& wait) { return m_signal[c].wait(src, key(Op::kSignal), wait); });
}

uint32_t Group::push_epoch(int64_t channel) {
  const uint32_t c = checked_channel(channel);
  const auto turn = take_turn(m_counter_mutex[c]);
  CallRecord call = record(Op::kPushEpoch, c);
  begin(call);
  return m_push[c].epoch();
}

void Group::push_exit(int64_t channel) {
  const uint32_t c = checked_channel(channel);
  const auto turn = take_turn(m_counter_mutex[c]);
  CallRecord call = record(Op::kPushExit, c);
  begin(call);
  m_push[c].exit();
}

}  // namespace gpusync::cpu

// A group that is reset in place, over and over, whatever state it was in.
#include <unistd.h>

#include "stress.h"

namespace stress {
namespace {

using gpusync::Algo;
using gpusync::DType;
using gpusync::ReduceOp;

/// As SyncGroup.reset, with another kind of meeting.
void reset(Rank& rank, cpu::Group& group) {
  while (!group.is_idle()) usleep(10);
  rank.pause();
  if (rank.options().skip_meeting != 1) rank.meet();
  rank.pause();
  group.rebase();
  rank.pause();
  if (rank.options().skip_meeting != 2) rank.meet();
  rank.pause();
  group.revive();
}

/// Rounds that nobody may fail.
void live(Rank& rank, cpu::Group& group, Rounds& rounds, uint64_t chance) {
  group.set_timeout(rank.options().timeout);
  const auto channel = static_cast<int64_t>(chance % Rank::kChannels);
  rounds.barrier(channel);
  switch (chance >> 8 & 3) {
    case 0: rounds.pull(channel, true); break;
    case 1: rounds.push(channel); break;
    case 2: rounds.signal_all(channel); break;
    default: rounds.all_reduce(100, DType::kInt32, ReduceOp::kSum, Algo::kPullTwoShot); break;
  }
  rounds.barrier(0);
}

/// Something that leaves the ranks out of step; returns whether this rank got an error.
bool disturb(Rank& rank, cpu::Group& group, uint64_t chance) {
  constexpr double kTimeout = 0.003;
  const auto odd = static_cast<uint32_t>((chance >> 16) % rank.ranks());
  const bool is_odd = rank.id() == odd;
  const bool whole = (chance >> 32 & 3) == 0;
  // Signals that nobody waits for, and a push that one rank alone has ended; if the group stays whole, while
  // the others are on their way to the reset.
  if (is_odd) {
    rank.pause();
    for (uint32_t r = 0; r < rank.ranks(); ++r) group.signal(r, 1);
    group.push_exit(0);
  }
  if (whole) return false;
  rank.meet();  // whoever is still in a call that all complete may find the group broken there
  const int64_t sizes[] = {is_odd ? 7 : 8};
  int32_t data[8] = {};
  switch (chance >> 32 & 3) {
    case 1:  // one rank calls something else
      return !Rank::error_of([&] {
                group.all_reduce(data, data, {DType::kInt32, static_cast<uint64_t>(sizes[0]), sizes},
                                 ReduceOp::kSum, Algo::kPullOneShot);
              }).empty();
    default:  // one rank comes when the others are about to give up, or does not come
      if (!is_odd) group.set_timeout(kTimeout);
      if (is_odd && (chance >> 40 & 3) == 0) return true;
      if (is_odd) usleep(static_cast<useconds_t>(1e6 * kTimeout + 100));
      return !Rank::error_of([&] { group.barrier(2, true); }).empty();
  }
}

}  // namespace

/// The second life of a group begins as the first did, whatever was under way, and nothing of the first
/// counts in it.
void resets(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    const uint64_t chance = mix(rank.options().seed, k, 0x7e5e7);
    live(rank, *group, rounds, chance);
    if (disturb(rank, *group, chance) && rank.id() == 0) rank.count(0);
    reset(rank, *group);
    if (group->failure() != nullptr)
      rank.fail("a group that was reset is broken: %s", group->failure()->text);
    if (rank.id() == 0) rank.count(1);
  }
}

}  // namespace stress

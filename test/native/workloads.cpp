// Workloads on groups that live: nobody may fail, whatever the delays.
#include "stress.h"

namespace stress {
namespace {

using gpusync::Algo;
using gpusync::DType;
using gpusync::Op;
using gpusync::ReduceOp;

/// A random all-reduce that all ranks draw alike: mostly small, some of several staging halves, some empty.
void random_all_reduce(Rounds& rounds, uint64_t chance) {
  constexpr DType kTypes[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                              DType::kBFloat16, DType::kInt32,   DType::kInt64};
  uint64_t numel = 1 + (chance >> 8) % 100;
  if (chance % 8 == 0) numel = (chance >> 8) % (Rank::kHalfBytes / 2);
  if (chance % 64 == 1) numel = 0;
  constexpr Algo kAlgos[] = {Algo::kNone, Algo::kPullOneShot, Algo::kPullTwoShot, Algo::kPushOneShot};
  const auto op = static_cast<ReduceOp>((chance >> 40) % 3);
  rounds.all_reduce(numel, kTypes[(chance >> 32) % 6], op, kAlgos[(chance >> 48) % 4]);
}

void random_exchange(Rounds& rounds, uint64_t chance) {
  constexpr Op kOps[] = {Op::kAllGather, Op::kBroadcast, Op::kAllToAll, Op::kReduceScatter, Op::kReduce};
  uint64_t columns = 1 + (chance >> 8) % 100;
  if (chance % 8 == 0) columns = (chance >> 8) % (Rank::kHalfBytes / 16);
  if (chance % 64 == 1) columns = 0;
  rounds.exchange(kOps[(chance >> 32) % 5], columns);
}

}  // namespace

void barriers(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  uint64_t k = 0;
  for (; rank.go_on(k); ++k) rounds.barrier(0);
  if (rank.id() == 0) rank.count(0, k);
}

void pulls(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  for (uint64_t k = 0; rank.go_on(k); ++k) rounds.pull(0, k % 3 == 0);
}

void signals(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    rounds.ping_pong(1);
    rounds.signal_all(0);
  }
}

/// One rank at a time is awake, so that nobody else wakes a rank whose own wake-up was lost. Each takes a
/// while, such that its neighbour is just falling asleep.
void rings(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  uint64_t k = 0;
  for (; rank.go_on(k); ++k) rank.timed([&] { rounds.ring(0); });
  if (rank.id() == 0) rank.count(0, k);
}

void pushes(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  for (uint64_t k = 0; rank.go_on(k); ++k) rounds.push(0);
}

void all_reduces(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  // Zero-size calls advance nothing, so a round has one that does.
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    random_all_reduce(rounds, mix(rank.options().seed, k));
    rounds.all_reduce(1 + k % 5000, DType::kInt32, ReduceOp::kSum, Algo::kPullOneShot);
  }
}

void exchanges(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    random_exchange(rounds, mix(rank.options().seed, k));
    random_all_reduce(rounds, mix(rank.options().seed, k, 1));  // all of them share the staging memory
    rounds.exchange(Op::kAllGather, 1 + k % 50);
  }
}

void mixed(Rank& rank) {
  const auto group = rank.open_together(rank.options().timeout);
  Rounds rounds(rank, *group);
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    const uint64_t chance = mix(rank.options().seed, k, 0x313);
    const auto channel = static_cast<int64_t>(chance % Rank::kChannels);
    switch ((chance >> 8) % 7) {
      case 0: rounds.pull(channel, chance >> 16 & 1); break;
      case 1: rounds.push(channel); break;
      case 2: rounds.signal_all(channel); break;
      case 3: rounds.ping_pong(channel); break;
      case 4: random_all_reduce(rounds, chance >> 11); break;
      case 5: random_exchange(rounds, chance >> 11); break;
      default: break;
    }
    rounds.barrier(channel);
  }
}

/// Ranks open the group at different times and start at once: what a fast one tells a slow one before that
/// has even opened must not be lost.
void opening(Rank& rank) {
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    rank.renew_memory();
    if (rank.id() == k % rank.ranks()) {
      Rank::spin_until(Rank::seconds() +
                       1e-6 * static_cast<double>(rank.random(1 + rank.options().delay_us)));
    }
    rank.pause();
    const auto group = rank.open(rank.options().timeout);
    Rounds rounds(rank, *group);
    switch (k % 4) {
      case 0: rounds.barrier(0); break;
      case 1: rounds.signal_all(1); break;
      case 2: rounds.pull(2, true); break;
      default: rounds.all_reduce(100, DType::kFloat32, ReduceOp::kSum, Algo::kPullTwoShot); break;
    }
    rounds.barrier(0);
    rank.meet();
  }
}

/// Ranks close the group as soon as they are through, while others may not have noticed yet that they are.
void closing(Rank& rank) {
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    rank.renew_memory();
    auto group = rank.open_together(rank.options().timeout);
    {
      Rounds rounds(rank, *group);
      for (uint64_t i = 0; i <= k % 3; ++i) rounds.barrier(0);
      if (k % 4 == 0) rounds.all_reduce(10, DType::kInt32, ReduceOp::kSum, Algo::kPushOneShot);
      if (k % 4 == 1) rounds.signal_all(0);
    }
    group.reset();
  }
}

}  // namespace stress

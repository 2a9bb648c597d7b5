// Workloads on groups that break: all ranks hear of it, with the right reason, and nobody goes on.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "stress.h"

namespace stress {
namespace {

using gpusync::Algo;
using gpusync::DType;
using gpusync::ReduceOp;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void reduce_some(cpu::Group& group, uint64_t numel, DType dtype = DType::kInt32,
                 ReduceOp op = ReduceOp::kSum) {
  uint64_t data[16] = {};
  const int64_t sizes[] = {static_cast<int64_t>(numel)};
  group.all_reduce(data, data, {dtype, numel, sizes}, op, Algo::kPullOneShot);
}

constexpr uint64_t kMeetings = 5;

/// One of the calls in which all ranks wait for all.
void call(cpu::Group& group, uint64_t which) {
  switch (which % kMeetings) {
    case 0: return group.barrier(0, true);
    case 1: return group.pull_start(1);
    case 2: return group.pull_end(2, false);
    case 3: return reduce_some(group, 8);
    default: return group.barrier(2, false);
  }
}

/// As if the rank had died in front of a call: its page names a process that has ended.
void die(Rank& rank) {
  const pid_t child = fork();
  if (child == 0) {
    rank.open(60).release();
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

/// What the others get to see of a rank that is not there.
void expect_missing(const Rank& rank, cpu::Group& group, uint32_t late, const std::string& error) {
  const cpu::FailureRecord* failure = group.failure();
  if (error.empty() || failure == nullptr) rank.fail("passed without rank %u", late);
  const uint64_t missing = failure->missing;
  if (failure->reason != cpu::Reason::kTimeout || (missing >> late & 1) == 0 ||
      (missing >> failure->rank & 1) != 0) {
    rank.fail("rank %u is not the missing one in '%s'", late, error.c_str());
  }
  const std::string name = "for rank " + std::to_string(late) + " (";
  if (missing == uint64_t{1} << late && !contains(error, name)) {
    rank.fail("'%s' is not in '%s'", name.c_str(), error.c_str());
  }
}

}  // namespace

/// One rank never comes: it is late, has closed the group, or (processes) has died. The others raise, name
/// it, and are refused from then on, as it is itself when it comes late.
void expiring(Rank& rank) {
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    rank.renew_memory();
    const auto late = static_cast<uint32_t>(k % rank.ranks());
    const bool closes = k % 7 == 3;
    const bool dies = k % 7 == 5 && rank.options().processes;
    const bool signals = k % 5 == 4;
    auto group = rank.open_together(closes || dies ? 60 : 0.05);
    const double start = Rank::seconds();
    if (rank.id() == late) {
      for (uint32_t r = 0; signals && r < rank.ranks(); ++r) group->signal(r, 0);
      if (closes) group.reset();
      if (dies) die(rank);
    } else {
      const std::string error = Rank::error_of([&] {
        for (int i = 0; signals && i < 2; ++i)
          group->wait_signal(late, 0);  // the first is sent, the second is not
        call(*group, k / rank.ranks());
      });
      expect_missing(rank, *group, late, error);
      if (Rank::seconds() - start > 30) rank.fail("took the timeout to notice a rank that is gone");
    }
    rank.meet();
    if (group != nullptr) {
      const std::string error = Rank::error_of([&] { call(*group, k); });
      if (!contains(error, "is broken"))
        rank.fail("a call on a broken group was not refused: '%s'", error.c_str());
    }
    if (rank.id() == 0) rank.count(0);
    rank.meet();
  }
}

/// The ranks call different things: all of them raise, and say so.
void mismatches(Rank& rank) {
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    rank.renew_memory();
    const auto group = rank.open_together(rank.options().timeout);
    const bool odd = rank.id() == k / 7 % rank.ranks();
    rank.pause();
    const std::string error = Rank::error_of([&] {
      for (uint64_t i = 0; i < k % 2; ++i) group->barrier(0, true);
      switch (k % 7) {
        case 0: return group->barrier(0, odd);
        case 1: return odd ? group->pull_start(0) : group->barrier(0, true);
        case 2: return group->pull_end(0, odd);
        case 3: return reduce_some(*group, odd ? 7 : 8);
        case 4: return reduce_some(*group, 8, odd ? DType::kInt32 : DType::kFloat32);
        case 5: return reduce_some(*group, 8, DType::kInt32, odd ? ReduceOp::kMax : ReduceOp::kSum);
        default:
          if (odd) reduce_some(*group, 0);
          return reduce_some(*group, 8);
      }
    });
    if (!contains(error, "does not match")) {
      rank.fail("a mismatch of kind %lu was not noticed: '%s'", static_cast<unsigned long>(k % 7),
                error.c_str());
    }
    if (rank.id() == 0) rank.count(0);
    rank.meet();
  }
}

/// One rank comes when the others are about to give up. All pass or all raise; which of the two is kept about
/// even by moving the moment.
void give_ups(Rank& rank) {
  constexpr double kTimeout = 0.0015;
  double moment = kTimeout;  // the same on all ranks
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    rank.renew_memory();
    const auto late = static_cast<uint32_t>(k % rank.ranks());
    auto group = rank.open_together(kTimeout);
    const double start = Rank::seconds();
    const auto offset = 1e-6 * static_cast<double>(rank.random(60));
    if (rank.id() == late && moment > 1e-4) usleep(static_cast<useconds_t>(1e6 * moment) - 100);
    Rank::spin_until(start + offset + (rank.id() == late ? moment : 0));
    const bool passed = Rank::error_of([&] { call(*group, k / rank.ranks()); }).empty();
    rank.note(rank.id()) = passed;
    rank.meet();
    uint64_t passes = 0;
    for (uint32_t r = 0; r < rank.ranks(); ++r) passes += rank.note(r);
    if (passes != 0 && passes != rank.ranks() && rank.id() == 0) {
      std::string who;
      for (uint32_t r = 0; r < rank.ranks(); ++r) {
        if (rank.note(r) != 0) who += " " + std::to_string(r);
      }
      rank.fail("call %lu with rank %u late was passed by%s and given up by the others",
                static_cast<unsigned long>(k / rank.ranks() % kMeetings), late, who.c_str());
    }
    moment = std::clamp(moment * (passes != 0 ? 1.05 : 1 / 1.05), 1e-4, 1.0);
    if (rank.id() == 0) rank.count(passes != 0 ? 0 : 1);
  }
  rank.meet();
  const uint64_t rarer = std::min(rank.counted(0), rank.counted(1));
  if (rank.counted(0) + rank.counted(1) >= 200 && rarer < 10) {
    rank.fail("%lu calls were passed and %lu given up: this has tested nothing",
              static_cast<unsigned long>(rank.counted(0)), static_cast<unsigned long>(rank.counted(1)));
  }
}

}  // namespace stress

// The stress program: ranks as threads of one mapping, or as processes over shared memory, run a workload on
// the CPU protocol of csrc/, check every value they were promised, and are paused at random places. No torch.
//
// It ends with 0, or with 1 and a message at the first check that fails, or with 3 and a message when the
// watchdog finds it still running. The pieces: rank.cpp and run.cpp (ranks, their memory, pauses, watchdog),
// rounds.cpp (one verified round of each kind), workloads.cpp, breaking.cpp, resetting.cpp, kernels.cpp
// and keeping.cpp (what to run), main.cpp (options).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cpu/group.h"

namespace stress {

namespace cpu = gpusync::cpu;

struct Options {
  std::string workload;
  uint32_t ranks = 3;
  bool processes = false;  // else threads
  uint64_t rounds = 1000;
  double seconds = 0;  // not 0: stop after that many, if the rounds have not ended before
  uint64_t seed = 1;
  std::optional<uint32_t> preset;  // what every counter starts from
  uint32_t delay_us = 0;           // longest random delay that a rank takes of itself, between calls
  uint32_t disturb_us = 0;         // longest pause that a signal inflicts on a rank, anywhere
  uint32_t cores = 0;   // not 0: how many cores the ranks believe to have (whether they spin depends on it)
  double timeout = 60;  // of the group, seconds
  double limit = 0;     // not 0: the longest that one barrier or ring may take, seconds
  uint32_t skip_meeting =
      0;                    // a wrong design: this one, 1 or 2, of a reset's two meetings does not take place
  unsigned watchdog = 120;  // seconds
};

/// A well-mixed number that depends on all its arguments: what a rank writes in a round.
inline uint64_t mix(uint64_t a, uint64_t b = 0, uint64_t c = 0) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b * 0xC2B2AE3D27D4EB4Fu + c * 0x165667B19E3779F9u;
  x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9u;
  return x ^ x >> 29;
}

/// What the ranks share: the group's own memory, and the program's beside it (run.cpp).
class Arena;

class Rank {
 public:
  Rank(const Options& options, Arena& arena, uint32_t id)
      : m_options(options), m_arena(arena), m_id(id), m_random(mix(options.seed, id + 1)) {}

  const Options& options() const { return m_options; }
  uint32_t id() const { return m_id; }
  uint32_t ranks() const { return m_options.ranks; }

  // --- the group
  static constexpr uint32_t kChannels = 3;
  static constexpr size_t kHalfBytes = size_t{1} << 16;  // of the collectives' staging memory
  /// My view of the group in its present memory.
  std::unique_ptr<cpu::Group> open(double timeout);
  /// The same with every counter preset, where that is asked for, on all ranks before any of them goes on.
  std::unique_ptr<cpu::Group> open_together(double timeout);
  /// All ranks find the memory as if it had never been used. They have closed their groups before.
  void renew_memory();

  // --- meeting by other means than those under test
  void meet();
  /// Is there a round `round`? All ranks get the same answer as long as nobody finishes a round that somebody
  /// else has not begun, as is true of every workload here.
  bool go_on(uint64_t round);

  // --- memory that all ranks can reach, plain and apart from the group's
  static constexpr size_t kBoardWords = 8192;
  uint64_t* board(uint32_t rank) const;
  /// A word of each rank for the others to read after meet().
  uint64_t& note(uint32_t rank) const;

  // --- chance
  uint64_t random(uint64_t below) { return mix(m_random++) % below; }
  /// Now and then yields, spins, or sleeps for up to `delay_us`.
  void pause();
  static double seconds();
  static void spin_until(double time);

  // --- checks
  /// Prints the text (printf's format) and ends the program.
  [[noreturn, gnu::format(printf, 2, 3)]] void fail(const char* format, ...) const;
  void expect(uint64_t value, uint64_t expected, const char* what, uint32_t from) const {
    if (value != expected) {
      fail("%s of rank %u is %#lx instead of %#lx", what, from, static_cast<unsigned long>(value),
           static_cast<unsigned long>(expected));
    }
  }
  /// Runs `call`, and fails if it takes longer than the limit that the options set.
  template <class Call>
  void timed(Call&& call) {
    if (m_options.limit == 0) return call();
    const double start = seconds();
    call();
    if (const double took = seconds() - start; took > m_options.limit) fail("a call took %.2f s", took);
  }
  /// What `call` threw; empty if it did not.
  static std::string error_of(const std::function<void()>& call);
  /// Counts something that the program reports at its end: see Workload.
  void count(uint32_t index, uint64_t n = 1) const;
  uint64_t counted(uint32_t index) const;

 private:
  const Options& m_options;
  Arena& m_arena;
  uint32_t m_id;
  uint64_t m_random;
  uint64_t m_round = 0;
};

/// One verified round of each kind. All ranks run the same rounds in the same order, as far as one kind goes.
class Rounds {
 public:
  Rounds(Rank& rank, cpu::Group& group);

  /// Writes a message, passes a barrier, reads everybody's.
  void barrier(int64_t channel);
  /// Writes one message over the last one, and reads everybody's between pull_start and pull_end.
  void pull(int64_t channel, bool fence);
  /// Puts a message into everybody's buffer, signals, waits for everybody's signal, reads, and leaves the
  /// half.
  void push(int64_t channel);
  /// Sends every rank its own number of signals behind a message, and consumes as many as are due.
  void signal_all(int64_t channel);
  /// Neighbours in pairs: a message there, an answer back.
  void ping_pong(int64_t channel);
  /// Once around: each rank waits for its left neighbour's message, and then sends its own to the right.
  void ring(int64_t channel);
  void all_reduce(uint64_t numel, gpusync::DType dtype, gpusync::ReduceOp op, gpusync::Algo algo);
  /// One of the other collectives, with `columns` numbers from each rank for each.
  void exchange(gpusync::Op op, uint64_t columns);

 private:
  Rank& m_rank;
  cpu::Group& m_group;
  uint64_t m_barriers = 0;
  uint64_t m_pulls = 0;
  uint64_t m_pushes = 0;
  uint64_t m_signals = 0;
  uint64_t m_games = 0;
  uint64_t m_rings = 0;
  uint64_t m_reductions = 0;
  uint64_t m_exchanges = 0;
};

struct Workload {
  const char* name;
  void (*body)(Rank&);
  const char* counts[2];  // what count(0) and count(1) count
};

// workloads.cpp: groups that live
void barriers(Rank& rank);
void pulls(Rank& rank);
void signals(Rank& rank);
void rings(Rank& rank);
void pushes(Rank& rank);
void all_reduces(Rank& rank);
void exchanges(Rank& rank);
void mixed(Rank& rank);
void opening(Rank& rank);
void closing(Rank& rank);
// breaking.cpp: groups that break
void expiring(Rank& rank);
void mismatches(Rank& rank);
void give_ups(Rank& rank);
// resetting.cpp: groups that break and live on
void resets(Rank& rank);
// kernels.cpp: the wait of kernels
void kernels(Rank& rank);
// keeping.cpp: memory that captured graphs keep
void keeping(Rank& rank);

/// Runs the workload on all ranks; returns the program's exit code.
int run(const Options& options, const Workload& workload);

}  // namespace stress

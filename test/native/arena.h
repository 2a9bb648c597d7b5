// What the ranks of the stress program share.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "stress.h"

namespace stress {

/// The program's own words. All zero at first; the atomics are relaxed, so that they order nothing for the
/// ranks.
struct Control {
  pthread_barrier_t meeting;
  std::atomic<uint64_t> stop_at;  // not 0: the first round that is not run
  std::atomic<uint64_t> counts[2];
  struct alignas(gpusync::kLineBytes) PerRank {
    std::atomic<uint64_t> round;  // for the watchdog's message
    std::atomic<bool> done;
    uint64_t note;
  } rank[gpusync::kMaxRanks];
};

class Arena {
 public:
  explicit Arena(const Options& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Control& control() const { return *m_control; }
  void* group_memory() const { return m_group; }
  size_t group_bytes() const { return m_group_bytes; }
  uint64_t* board(uint32_t rank) const { return m_boards + rank * Rank::kBoardWords; }
  double start() const { return m_start; }

 private:
  void* allocate(size_t bytes) const;
  void release(void* memory, size_t bytes) const;

  bool m_processes;
  size_t m_group_bytes;
  size_t m_board_bytes;
  void* m_group;
  uint64_t* m_boards;
  Control* m_control;
  double m_start;
};

}  // namespace stress

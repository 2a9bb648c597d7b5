// One rank's GPU: a host thread for each GPU thread, and kernels in the order of one stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_on_host.h"

namespace collectives {

/// A kernel in the stream.
struct Kernel {
  std::function<void()> code;  // of one thread
  uint32_t call;
  uint32_t blocks;
  uint32_t threads;
  uint32_t pause_us;        // every thread pauses for at most so long, at its beginning and at barriers
  uint32_t row_blocks = 1;  // so many, one after the other, share a row
  std::function<void()> before = {};  // runs in one thread, when the kernels before have ended
};

class Gpu {
 public:
  /// Starts to run the kernels; `blocks` and `threads` are the most that one of them has.
  Gpu(uint32_t rank, std::vector<Kernel> stream, uint32_t blocks, uint32_t threads, uint64_t seed);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  /// Waits until they have ended.
  void join();
  /// Prints where every thread is.
  void print() const;

 private:
  /// A kernel at work.
  struct Running {
    explicit Running(const Kernel& kernel);
    std::deque<Barrier> barriers;  // of every block
    std::deque<Barrier> rows;
    std::deque<std::atomic<uint32_t>>
        passed;                               // barriers that the threads of each block have passed, together
    std::deque<std::atomic<uint32_t>> ended;  // threads of each block
  };

  void run(uint32_t block, uint32_t thread, uint64_t seed);

  const uint32_t m_rank;
  const std::vector<Kernel> m_stream;
  std::deque<Running> m_running;
  std::atomic<size_t> m_current{0};
  Barrier m_boundary;  // between kernels
  std::vector<std::thread> m_threads;
};

}  // namespace collectives

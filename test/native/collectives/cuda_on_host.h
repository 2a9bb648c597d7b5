// What CUDA has built in, for kernels whose threads are threads of the host: indices, a block's barrier,
// atomicAdd. The barrier is a place where threads pause at random, so that lanes, blocks and ranks get apart.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <unistd.h>
#include <vector_functions.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "random.h"

#undef __launch_bounds__
#define __launch_bounds__(...)

namespace collectives {

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};

/// A barrier of `threads` threads, any number of times.
class Barrier {
 public:
  explicit Barrier(uint32_t threads) : m_values(threads), m_threads(threads) {}

  /// Waits for all; was `value` true for all of them?
  bool meet(bool value = true) {
    std::unique_lock lock(m_mutex);
    m_all = m_all && value;
    if (++m_here == m_threads) {
      m_result = m_all;
      m_all = true;
      m_here = 0;
      ++m_turn;
      m_changed.notify_all();
    } else {
      m_changed.wait(lock, [this, turn = m_turn] { return m_turn != turn; });
    }
    return m_result;
  }

  /// The sum of the threads' values, in their order; once.
  float sum(uint32_t thread, float value) {
    m_values[thread] = value;
    meet();
    float sum = 0;
    for (const float each : m_values) sum += each;
    return sum;
  }

 private:
  std::mutex m_mutex;
  std::condition_variable m_changed;
  std::vector<float> m_values;
  const uint32_t m_threads;
  uint32_t m_here = 0;
  uint32_t m_turn = 0;
  bool m_all = true;
  bool m_result = true;
};

/// What a thread of a kernel knows beside its indices.
struct Thread {
  Barrier* block = nullptr;
  Barrier* row = nullptr;                     // of the blocks that share a row
  uint32_t pause_us = 0;                      // at most
  std::atomic<uint32_t>* barriers = nullptr;  // for the watchdog: how many it has passed in this kernel
  Random random{0};

  void pause() {
    if (pause_us != 0 && random.below(4) == 0) usleep(static_cast<useconds_t>(random.below(pause_us)));
  }

  bool meet(bool value) {
    const bool all = block->meet(value);
    barriers->fetch_add(1, std::memory_order_relaxed);
    pause();
    return all;
  }
};

inline thread_local Thread this_thread;

}  // namespace collectives

inline thread_local collectives::Index threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim{1, 1, 1};

inline void __syncthreads() { collectives::this_thread.meet(true); }
inline int __syncthreads_and(int value) { return collectives::this_thread.meet(value != 0) ? 1 : 0; }
inline int atomicAdd(int* word, int value) {
  return std::atomic_ref(*word).fetch_add(value, std::memory_order_relaxed);
}

inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

namespace gpusync::cuda {
using std::min;

/// row_sum.cuh has the device's.
class RowSum {
 public:
  explicit RowSum(uint32_t blocks) : m_thread(blockIdx.x % blocks * blockDim.x + threadIdx.x) {}
  void meet() const {}
  float operator()(float value) const { return collectives::this_thread.row->sum(m_thread, value); }

 private:
  const uint32_t m_thread;
};

}  // namespace gpusync::cuda

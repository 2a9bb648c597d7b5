// A group of ranks: their pads, and what kernels are given of them, as cuda::Group makes it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "cuda/launches.h"

namespace collectives {

using namespace gpusync;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

/// `bytes` and not one more, so that AddressSanitizer finds who goes beyond.
inline Memory allocate(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes) != 0) std::abort();
  return Memory(static_cast<char*>(memory));
}

class Group {
 public:
  /// `finished`: calls that all counters have behind them.
  Group(uint32_t world_size, size_t staging_bytes, uint32_t finished)
      : m_layout(0, staging_bytes), m_tokens(world_size) {
    for (uint32_t r = 0; r < world_size; ++r) {
      m_memory.push_back(allocate(m_layout.total_bytes(), kLineBytes));
      std::memset(m_memory[r].get(), 0, m_layout.total_bytes());
      m_pads.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(m_memory[r].get())));
    }
    for (uint32_t r = 0; r < world_size; ++r) preset(r, world_size, finished);
    for (uint32_t r = 0; r < world_size; ++r) add_rank(r, world_size);
  }

  uint32_t world_size() const { return static_cast<uint32_t>(m_memory.size()); }
  const cuda::Seat& seat(uint32_t rank) const { return m_seats[rank]; }
  const DeviceFailure& failure() const { return m_failure; }
  int32_t token(uint32_t rank) const { return m_tokens[rank]; }

  void set_timeout(uint64_t ns) { std::atomic_ref(m_timeout_ns).store(ns, std::memory_order_relaxed); }
  DeviceStatus status(uint32_t rank) const { return escape::status(m_seats[rank].wait.status); }

 private:
  template <class T>
  T* in_pad(uint32_t rank, size_t offset) {
    return reinterpret_cast<T*>(m_memory[rank].get() + offset);
  }

  void preset(uint32_t rank, uint32_t world_size, uint32_t finished) {
    auto* semaphores = in_pad<Semaphore>(rank, m_layout.semaphores(0));
    for (uint32_t s = 0; s < PullController::kStages * cuda::kMaxBlocks; ++s) {
      for (uint32_t r = 0; r < world_size; ++r) {
        semaphores[s].arrive<true>(r, Arrival{finished, 0}.pack());
        semaphores[s].set_epoch(r, finished);
      }
    }
    std::fill_n(in_pad<uint32_t>(rank, m_layout.push_calls(0)), cuda::kMaxBlocks, finished);
  }

  void add_rank(uint32_t rank, uint32_t world_size) {
    Semaphore* rows[kMaxRanks];
    WaitEscape& escape = m_escapes.emplace_back();
    for (uint32_t r = 0; r < world_size; ++r) {
      rows[r] = in_pad<Semaphore>(r, m_layout.semaphores(0));
      escape.status[r] = in_pad<uint32_t>(r, m_layout.status());
    }
    escape.claim = in_pad<uint32_t>(0, m_layout.claim());
    escape.failure = &m_failure;
    escape.timeout_ns = &m_timeout_ns;
    escape.gone = &m_gone;
    escape.rank = rank;
    escape.world_size = world_size;
    const PullController& pull = m_pull.emplace_back(rows, rank, world_size);
    m_seats.push_back({pull, {escape.status[rank], &escape, 0}, m_layout, m_pads.data(), &m_tokens[rank]});
  }

  const cuda::PadLayout m_layout;
  std::vector<int32_t> m_tokens;
  std::vector<Memory> m_memory;
  std::vector<int64_t> m_pads;
  std::deque<PullController> m_pull;
  std::deque<WaitEscape> m_escapes;
  std::deque<cuda::Seat> m_seats;
  DeviceFailure m_failure{};
  uint64_t m_timeout_ns = 0;
  uint64_t m_gone = 0;
};

}  // namespace collectives

// The memory that kernels of a closed group still touch. No CUDA and no torch here.
//
// It belongs to the group and to every graph that holds ops of the group, for a graph may be replayed when
// the group has been closed. A graph lets go of it on a thread of the driver's, which must neither call CUDA
// nor block: so nothing is freed there. What a graph was the last to let go of is freed by the next group
// that is made or closed. At exit it is not freed at all.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace gpusync::cuda {

class KeptMemory {
 public:
  using Parts = std::vector<std::shared_ptr<void>>;

  /// What a group, or a thread that is about to give it to a graph, holds. Any thread but the driver's may
  /// let go of it.
  struct LetGo {
    void operator()(KeptMemory* memory) const {
      if (memory->is_last()) delete memory;
    }
  };
  using Owner = std::unique_ptr<KeptMemory, LetGo>;

  static Owner make(Parts parts) { return Owner(new KeptMemory(std::move(parts))); }
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  /// One owner more.
  Owner share() {
    m_owners.fetch_add(1, std::memory_order_relaxed);
    return Owner(this);
  }

  /// What a graph does with the owner that it was given, by release(), on a thread of the driver's: neither
  /// frees anything nor waits.
  void let_go_later() noexcept {
    if (!is_last()) return;
    m_next = s_left.load(std::memory_order_relaxed);
    while (
        !s_left.compare_exchange_weak(m_next, this, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  /// Frees what graphs were the last to let go of.
  static void free_left() {
    KeptMemory* memory = s_left.exchange(nullptr, std::memory_order_acquire);
    while (memory != nullptr) delete std::exchange(memory, memory->m_next);
  }

 private:
  explicit KeptMemory(Parts parts) : m_parts(std::move(parts)) {}
  ~KeptMemory() = default;

  bool is_last() noexcept { return m_owners.fetch_sub(1, std::memory_order_acq_rel) == 1; }

  static inline std::atomic<KeptMemory*> s_left{nullptr};

  Parts m_parts;
  std::atomic<uint32_t> m_owners{1};
  KeptMemory* m_next = nullptr;
};

}  // namespace gpusync::cuda

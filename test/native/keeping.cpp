// Workload on the memory that captured graphs keep when their group is closed: threads stand for the
// driver's, on which graphs let go of it.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/kept_memory.h"
#include "stress.h"

namespace stress {
namespace {

using gpusync::cuda::KeptMemory;

constexpr uint32_t kGraphs = 4;

thread_local bool t_is_drivers = false;

/// What is known of one group's memory beside it.
struct Ghost {
  std::atomic<uint32_t> owners{1 + kGraphs};  // those that have not begun to let go
  std::atomic<uint32_t> freed{0};
  std::atomic<bool> freed_early{false};
  std::atomic<bool> freed_by_driver{false};
};

KeptMemory::Owner make(Ghost& ghost) {
  const auto free = [](Ghost* g) {
    g->freed_early = g->freed_early || g->owners != 0;
    g->freed_by_driver = g->freed_by_driver || t_is_drivers;
    ++g->freed;
  };
  return KeptMemory::make({std::shared_ptr<void>(&ghost, [free](void* g) { free(static_cast<Ghost*>(g)); }),
                           std::make_shared<uint64_t>(1)});
}

}  // namespace

/// Each round every rank closes a group in the middle of its graphs' ends, while others free what is left.
/// Everything is freed exactly once, by no thread of the driver's, and not while somebody has it.
void keeping(Rank& rank) {
  for (uint64_t k = 0; rank.go_on(k); ++k) {
    Ghost ghost;
    KeptMemory::Owner group = make(ghost);
    std::vector<std::thread> graphs;
    for (uint32_t g = 0; g < kGraphs; ++g) {
      KeptMemory* share = group->share().release();
      const uint64_t wait_us = rank.random(100);
      graphs.emplace_back([&ghost, share, wait_us] {
        t_is_drivers = true;
        Rank::spin_until(Rank::seconds() + static_cast<double>(wait_us) * 1e-6);
        --ghost.owners;
        share->let_go_later();
      });
    }
    rank.pause();
    --ghost.owners;
    group.reset();
    KeptMemory::free_left();
    for (std::thread& graph : graphs) graph.join();
    KeptMemory::free_left();
    rank.meet();  // another rank's thread may be about to free mine
    if (ghost.freed_early) rank.fail("memory was freed while a graph had it");
    if (ghost.freed_by_driver) rank.fail("memory was freed on a thread of the driver's");
    rank.expect(ghost.freed, 1, "the number of times that memory was freed", rank.id());
    rank.count(0);
    rank.meet();
  }
}

}  // namespace stress

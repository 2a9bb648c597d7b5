#include "gpu.h"

#include <cstdio>

namespace collectives {

Gpu::Running::Running(const Kernel& kernel) : passed(kernel.blocks), ended(kernel.blocks) {
  for (uint32_t b = 0; b < kernel.blocks; ++b) barriers.emplace_back(kernel.threads);
  for (uint32_t b = 0; b < kernel.blocks; b += kernel.row_blocks)
    rows.emplace_back(kernel.row_blocks * kernel.threads);
}

Gpu::Gpu(uint32_t rank, std::vector<Kernel> stream, uint32_t blocks, uint32_t threads, uint64_t seed)
    : m_rank(rank), m_stream(std::move(stream)), m_boundary(blocks * threads) {
  for (const Kernel& kernel : m_stream) m_running.emplace_back(kernel);
  for (uint32_t b = 0; b < blocks; ++b) {
    for (uint32_t t = 0; t < threads; ++t) {
      m_threads.emplace_back([=, this] { run(b, t, ((seed * 64 + rank) * 64 + b) * 64 + t); });
    }
  }
}

void Gpu::join() {
  for (std::thread& thread : m_threads) thread.join();
}

void Gpu::run(uint32_t block, uint32_t thread, uint64_t seed) {
  this_thread.random = Random(seed);
  for (size_t k = 0; k < m_stream.size(); ++k) {
    const Kernel& kernel = m_stream[k];
    Running& running = m_running[k];
    m_boundary.meet();
    if (block == 0 && thread == 0) {
      m_current.store(k, std::memory_order_relaxed);
      if (kernel.before) kernel.before();
    }
    if (kernel.before) m_boundary.meet();
    if (block >= kernel.blocks || thread >= kernel.threads) continue;
    this_thread.block = &running.barriers[block];
    this_thread.row = &running.rows[block / kernel.row_blocks];
    this_thread.barriers = &running.passed[block];
    this_thread.pause_us = kernel.pause_us;
    threadIdx.x = thread;
    blockIdx.x = block;
    blockDim.x = kernel.threads;
    gridDim.x = kernel.blocks;
    this_thread.pause();
    kernel.code();
    running.ended[block].fetch_add(1, std::memory_order_relaxed);
  }
}

void Gpu::print() const {
  const size_t k = m_current.load(std::memory_order_relaxed);
  if (k >= m_stream.size()) return;
  const Kernel& kernel = m_stream[k];
  std::fprintf(stderr, "rank %u: call %u, launch %zu of %zu:", m_rank, kernel.call, k, m_stream.size());
  for (uint32_t b = 0; b < kernel.blocks; ++b) {
    std::fprintf(stderr, " block %u: %u of %u threads have ended, %u barriers passed;", b,
                 m_running[k].ended[b].load(std::memory_order_relaxed), kernel.threads,
                 m_running[k].passed[b].load(std::memory_order_relaxed));
  }
  std::fprintf(stderr, "\n");
}

}  // namespace collectives

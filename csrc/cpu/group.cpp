#include "group.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "futex.h"

namespace gpusync::cpu {
namespace {

std::atomic<unsigned> g_fork_generation{0};

/// A forked child has inherited its parent's groups: their memory is mapped, their rank is the parent's. It
/// must not use them, and its own process id does not tell (a thread may have opened the group).
void watch_forks() {
  static const int watching = pthread_atfork(nullptr, nullptr, [] { g_fork_generation.fetch_add(1); });
  (void)watching;
}

/// Spinning only pays while every rank has a core: otherwise it keeps the core from the rank that is waited
/// for.
int spins_for(uint32_t world_size) {
  constexpr int kSpins = 2000;  // some 20 to 100 µs with the pause instruction
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 0;
  return static_cast<uint32_t>(CPU_COUNT(&cores)) >= world_size ? kSpins : 0;
}

}  // namespace

Group::Group(GroupConfig config, void* memory, std::shared_ptr<void> keep_alive)
    : m_config(std::move(config)),
      m_memory(memory),
      m_keep_alive(std::move(keep_alive)),
      m_layout(m_config.world_size, m_config.channels, m_config.staging_bytes),
      m_spins(spins_for(m_config.world_size)),
      m_channel_mutex(m_config.channels + 1),
      m_counter_mutex(m_config.channels) {
  watch_forks();
  m_fork_generation = g_fork_generation.load();
  for (uint32_t c = 0; c <= m_config.channels; ++c) {
    Semaphore* rows[kMaxRanks];
    Mailbox* mailboxes[kMaxRanks];
    for (uint32_t r = 0; r < m_config.world_size; ++r) {
      rows[r] = channel(r, c).stages;
      mailboxes[r] = &channel(r, c).mailbox;
    }
    m_pull.emplace_back(rows, m_config.rank, m_config.world_size);
    m_signal.emplace_back(mailboxes, m_config.rank, m_config.world_size);
    m_push.emplace_back(&channel(m_config.rank, c).push_calls);
  }
  RankPage& mine = page(m_config.rank);
  set_timeout(m_config.timeout);
  mine.global_rank = m_config.global_rank;
  std::strncpy(mine.host, m_config.host.c_str(), sizeof mine.host - 1);
  std::atomic_ref<int32_t>(mine.pid).store(getpid(), std::memory_order_release);
}

Group::~Group() {
  if (is_inherited()) return;
  m_device_part.reset();  // waits for its kernels
  leave();
}

void Group::leave() {
  std::atomic_ref<uint64_t>(group_page().gone).fetch_or(uint64_t{1} << m_config.rank);
  std::atomic_ref<int32_t>(page(m_config.rank).pid).store(-1, std::memory_order_release);
}

bool Group::is_inherited() const {
  return m_fork_generation != g_fork_generation.load(std::memory_order_relaxed);
}

void Group::require_own_process() const {
  if (is_inherited()) {
    throw std::runtime_error(
        "gpusync: group '" + m_config.name +
        "' was made before this process was forked and belongs to the parent: make a group of its "
        "own in the child (or start children with the 'spawn' or 'forkserver' method)");
  }
}

void Group::require_usable(const CallRecord& call) {
  require_own_process();
  if (failure() != nullptr) throw_broken(call);
}

void Group::begin(CallRecord& call) {
  require_usable(call);
  RankPage& mine = page(m_config.rank);
  call.number = std::atomic_ref<uint32_t>(mine.calls).load(std::memory_order_relaxed) + 1;
  mine.ring.write(call);
  std::atomic_ref<uint32_t>(mine.calls).store(call.number, std::memory_order_relaxed);
}

void Group::set_timeout(double seconds) {
  require_own_process();
  // Longer than half a century is for ever.
  const double ns = std::min(seconds * 1e9, 0x1p61);
  std::atomic_ref<uint64_t>(page(m_config.rank).timeout_ns)
      .store(static_cast<uint64_t>(ns), std::memory_order_relaxed);
}

void Group::ring_doorbell(uint32_t rank) const {
  RankPage& peer = page(rank);
  if (std::atomic_ref<uint32_t>(peer.sleepers).load(std::memory_order_seq_cst) == 0) return;
  std::atomic_ref<uint32_t>(peer.event).fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&peer.event);
}

void Group::preset(uint32_t epoch) {
  const uint64_t told = Arrival{epoch, 0}.pack();
  for (uint32_t c = 0; c <= m_config.channels; ++c) {
    Channel& mine = channel(m_config.rank, c);
    for (Semaphore* semaphore : {&mine.stages[0], &mine.stages[1], &mine.mailbox.inbox}) {
      for (uint32_t r = 0; r < m_config.world_size; ++r) {
        semaphore->arrive<true>(r, told);
        semaphore->set_epoch(r, epoch);
      }
    }
    for (uint32_t r = 0; r < m_config.world_size; ++r) mine.mailbox.sent[r] = mine.mailbox.seen[r] = epoch;
    mine.push_calls = epoch;
  }
}

}  // namespace gpusync::cpu

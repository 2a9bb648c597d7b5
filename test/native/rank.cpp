// What a rank of the stress program can do, and the memory it shares with the others.
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "arena.h"

namespace stress {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

// ---- memory
Arena::Arena(const Options& options)
    : m_processes(options.processes),
      m_group_bytes(
          cpu::Layout(options.ranks, Rank::kChannels, Rank::kHalfBytes * gpusync::kHalves).total_bytes()),
      m_board_bytes(options.ranks * Rank::kBoardWords * sizeof(uint64_t)),
      m_group(allocate(m_group_bytes)),
      m_boards(static_cast<uint64_t*>(allocate(m_board_bytes))),
      m_control(new (allocate(sizeof(Control))) Control{}),
      m_start(Rank::seconds()) {
  pthread_barrierattr_t shared;
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&m_control->meeting, &shared, options.ranks);
}

Arena::~Arena() {
  release(m_control, sizeof(Control));
  release(m_boards, m_board_bytes);
  release(m_group, m_group_bytes);
}

/// For processes a shared mapping, for threads the heap, where AddressSanitizer guards both ends.
void* Arena::allocate(size_t bytes) const {
  const size_t size = gpusync::round_up(bytes, kPage);
  void* memory = m_processes ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)
                             : std::aligned_alloc(kPage, size);
  if (memory == nullptr || memory == MAP_FAILED) throw std::bad_alloc();
  return std::memset(memory, 0, size);
}

void Arena::release(void* memory, size_t bytes) const {
  if (m_processes) {
    munmap(memory, gpusync::round_up(bytes, kPage));
  } else {
    std::free(memory);
  }
}

// ---- the group
std::unique_ptr<cpu::Group> Rank::open(double timeout) {
  cpu::GroupConfig config;
  config.name = "stress";
  config.rank = m_id;
  config.world_size = ranks();
  config.channels = kChannels;
  config.staging_bytes = kHalfBytes * gpusync::kHalves;
  config.timeout = timeout;
  config.global_rank = static_cast<int32_t>(m_id);
  config.host = "here";
  config.pids_visible = m_options.processes;
  return std::make_unique<cpu::Group>(std::move(config), m_arena.group_memory(), nullptr);
}

std::unique_ptr<cpu::Group> Rank::open_together(double timeout) {
  auto group = open(timeout);
  if (m_options.preset) group->preset(*m_options.preset);
  meet();
  return group;
}

void Rank::renew_memory() {
  meet();
  if (m_id == 0) std::memset(m_arena.group_memory(), 0, m_arena.group_bytes());
  meet();
}

// ---- meeting
void Rank::meet() { pthread_barrier_wait(&m_arena.control().meeting); }

bool Rank::go_on(uint64_t round) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  Control& control = m_arena.control();
  m_round = round;
  control.rank[m_id].round.store(round, kRelaxed);
  // Whoever asks for round k+2 has finished k+1, which rank 0 began after it had set the end.
  const bool late =
      m_options.seconds > 0 && round % 16 == 0 && seconds() - m_arena.start() > m_options.seconds;
  if (m_id == 0 && late && control.stop_at.load(kRelaxed) == 0) control.stop_at.store(round + 2, kRelaxed);
  const uint64_t stop_at = control.stop_at.load(kRelaxed);
  return round < m_options.rounds && (stop_at == 0 || round < stop_at);
}

uint64_t* Rank::board(uint32_t rank) const { return m_arena.board(rank); }
uint64_t& Rank::note(uint32_t rank) const { return m_arena.control().rank[rank].note; }

// ---- chance
double Rank::seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void Rank::spin_until(double time) {
  while (seconds() < time) {
  }
}

void Rank::pause() {
  if (m_options.delay_us == 0) return;
  switch (random(16)) {
    case 0: usleep(static_cast<useconds_t>(random(m_options.delay_us))); break;
    case 1:
    case 2: spin_until(seconds() + 1e-6 * static_cast<double>(random(60))); break;
    case 3: sched_yield(); break;
    default: break;
  }
}

// ---- checks
void Rank::fail(const char* format, ...) const {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "stress: %s, seed %lu, rank %u of %u, round %lu: %s\n", m_options.workload.c_str(),
               static_cast<unsigned long>(m_options.seed), m_id, ranks(), static_cast<unsigned long>(m_round),
               text);
  _exit(1);
}

std::string Rank::error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

void Rank::count(uint32_t index, uint64_t n) const {
  m_arena.control().counts[index].fetch_add(n, std::memory_order_relaxed);
}

uint64_t Rank::counted(uint32_t index) const {
  return m_arena.control().counts[index].load(std::memory_order_relaxed);
}

}  // namespace stress

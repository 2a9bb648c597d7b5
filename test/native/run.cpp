// Starts the ranks, pauses them at random, and ends them all when one fails or the watchdog barks.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "arena.h"

namespace stress {
namespace {

const Options* g_options;
const Arena* g_arena;
pid_t g_children[gpusync::kMaxRanks];

void kill_children() {
  for (uint32_t r = 0; r < g_options->ranks; ++r) {
    if (g_children[r] > 0) kill(g_children[r], SIGKILL);
  }
}

void on_alarm(int) {
  char text[4096];
  int used = std::snprintf(
      text, sizeof text,
      "stress: watchdog: %s, seed %lu, has not ended after %u s; rounds begun:", g_options->workload.c_str(),
      static_cast<unsigned long>(g_options->seed), g_options->watchdog);
  for (uint32_t r = 0; r < g_options->ranks; ++r) {
    const auto& rank = g_arena->control().rank[r];
    used += std::snprintf(text + used, sizeof text - used, " %lu%s",
                          static_cast<unsigned long>(rank.round.load()), rank.done.load() ? " (done)" : "");
  }
  text[used++] = '\n';
  if (write(STDERR_FILENO, text, static_cast<size_t>(used)) < 0) {
  }
  kill_children();
  _exit(3);
}

/// The pause that a rank takes wherever it happens to be: also in the middle of an arrival, a wait, or a
/// decision.
void on_disturbance(int) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const uint64_t pause_ns = mix(static_cast<uint64_t>(now.tv_nsec)) % (g_options->disturb_us * 1000u);
  const timespec pause{0, static_cast<long>(pause_ns % 1'000'000'000)};
  nanosleep(&pause, nullptr);
}

void handle(int number, void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(number, &action, nullptr);
}

void run_rank(const Workload& workload, Arena& arena, uint32_t id) {
  Rank rank(*g_options, arena, id);
  try {
    workload.body(rank);
  } catch (const std::exception& error) {
    rank.fail("unexpected error: %s", error.what());
  }
  arena.control().rank[id].done.store(true);
}

/// Sends a disturbance to one rank after the other until all are done (or `still_fine` says no).
template <class Send, class StillFine>
void disturb(Send send, StillFine still_fine) {
  uint64_t state = mix(g_options->seed, 0xd157);
  const auto& ranks = g_arena->control().rank;
  for (;;) {
    uint32_t done = 0;
    for (uint32_t r = 0; r < g_options->ranks; ++r) done += ranks[r].done.load() ? 1 : 0;
    if (done == g_options->ranks || !still_fine()) return;
    const uint64_t chance = mix(state++);
    const auto r = static_cast<uint32_t>(chance % g_options->ranks);
    if (g_options->disturb_us != 0 && !ranks[r].done.load()) send(r);
    usleep(g_options->disturb_us != 0 ? static_cast<useconds_t>((chance >> 32) % 400) : 2000);
  }
}

void run_threads(const Workload& workload, Arena& arena) {
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < g_options->ranks; ++r) {
    threads.emplace_back([&workload, &arena, r] { run_rank(workload, arena, r); });
  }
  // A thread that has ended but was not joined yet can still be sent a signal.
  disturb([&](uint32_t r) { pthread_kill(threads[r].native_handle(), SIGUSR1); }, [] { return true; });
  for (auto& thread : threads) thread.join();
}

/// False: a rank did not end as it should.
bool run_processes(const Workload& workload, Arena& arena) {
  for (uint32_t r = 0; r < g_options->ranks; ++r) {
    const pid_t parent = getpid();
    g_children[r] = fork();
    if (g_children[r] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      for (pid_t& child : g_children) child = 0;
      run_rank(workload, arena, r);
      std::exit(0);  // lets sanitizers report
    }
  }
  uint32_t running = g_options->ranks;
  bool fine = true;
  const auto reap = [&](int flags) {
    int status = 0;
    for (pid_t child; running > 0 && (child = waitpid(-1, &status, flags)) > 0;) {
      --running;
      for (uint32_t r = 0; r < g_options->ranks; ++r) {
        if (g_children[r] == child) g_children[r] = 0;
      }
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
      if (fine) {
        std::fprintf(stderr, "stress: a rank's process ended with %s %d\n",
                     WIFSIGNALED(status) ? "signal" : "code",
                     WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
      }
      fine = false;
    }
    return fine;
  };
  disturb(
      [](uint32_t r) {
        if (g_children[r] > 0) kill(g_children[r], SIGUSR1);
      },
      [&] { return reap(WNOHANG); });
  if (!fine) kill_children();
  reap(0);
  return fine;
}

}  // namespace

int run(const Options& options, const Workload& workload) {
  Arena arena(options);
  g_options = &options;
  g_arena = &arena;
  handle(SIGALRM, on_alarm);
  handle(SIGUSR1, on_disturbance);
  alarm(options.watchdog);
  if (options.processes) {
    if (!run_processes(workload, arena)) return 1;
  } else {
    run_threads(workload, arena);
  }
  const double took = Rank::seconds() - arena.start();
  std::printf("stress: %s: %u ranks as %s, %.2f s", workload.name, options.ranks,
              options.processes ? "processes" : "threads", took);
  for (int i = 0; i < 2; ++i) {
    if (workload.counts[i] == nullptr) continue;
    std::printf(", %lu %s", static_cast<unsigned long>(arena.control().counts[i].load()), workload.counts[i]);
  }
  std::printf(", no mismatch\n");
  return 0;
}

}  // namespace stress

/// How many cores the ranks believe to have: their waits spin only where every rank has one of its own, and
/// that path is to be tested on small machines too. Takes the place of the C library's function in this
/// program.
extern "C" int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t* cores) noexcept {
  if (stress::g_options == nullptr || stress::g_options->cores == 0) {
    CPU_ZERO_S(bytes, cores);
    return syscall(SYS_sched_getaffinity, pid, bytes, cores) < 0 ? -1 : 0;
  }
  CPU_ZERO_S(bytes, cores);
  for (uint32_t i = 0; i < stress::g_options->cores; ++i) CPU_SET_S(i, bytes, cores);
  return 0;
}

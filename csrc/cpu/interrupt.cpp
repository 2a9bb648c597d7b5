#include "interrupt.h"

#include <csignal>

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <forward_list>
#include <mutex>

namespace gpusync::cpu {
namespace {

/// The handlers that stand behind ours.
struct Chain {
  struct sigaction top;   // the one that ours has replaced last
  struct sigaction base;  // the one that ours has replaced first
};

std::mutex g_mutex;  // guards all but what the handler reads
int g_counters = 0;
// As many as there were handlers; never freed, for ours may be reading any of them.
std::forward_list<Chain>& g_chains = *new std::forward_list<Chain>;
std::atomic<const Chain*> g_chain{nullptr};
std::atomic<unsigned> g_interrupts{0};
std::atomic<long> g_handling{0};  // the thread that is in our handler

void forward(const struct sigaction& action, int number, siginfo_t* info, void* context) {
  if (action.sa_flags & SA_SIGINFO) {
    action.sa_sigaction(number, info, context);
  } else {
    action.sa_handler(number);
  }
}

void on_interrupt(int number, siginfo_t* info, void* context) {
  const Chain* chain = g_chain.load();
  const long me = syscall(SYS_gettid);
  const long outer = g_handling.load();
  if (outer == me) {
    // A handler that was installed over ours calls ours as its predecessor: what comes next is what was there
    // first.
    forward(chain->base, number, info, context);
    return;
  }
  g_interrupts.fetch_add(1, std::memory_order_relaxed);
  g_handling.store(me);
  forward(chain->top, number, info, context);
  g_handling.store(outer);
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_interrupt;
}

bool has_handler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

bool same(const struct sigaction& a, const struct sigaction& b) {
  return a.sa_sigaction == b.sa_sigaction && a.sa_flags == b.sa_flags;
}

const Chain* find_chain(const struct sigaction& top, const struct sigaction& base) {
  for (const Chain& chain : g_chains) {
    if (same(chain.top, top) && same(chain.base, base)) return &chain;
  }
  return &g_chains.emplace_front(Chain{top, base});
}

void install() {
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) != 0 || is_ours(current) || !has_handler(current)) return;
  const Chain* before = g_chain.load();
  g_chain.store(find_chain(current, before == nullptr ? current : before->base));
  struct sigaction ours = current;
  ours.sa_flags |= SA_SIGINFO;
  ours.sa_sigaction = on_interrupt;
  sigaction(SIGINT, &ours, nullptr);
}

/// A handler that somebody has installed over ours stays.
void remove() {
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) != 0 || !is_ours(current)) return;
  const Chain* chain = g_chain.load();
  sigaction(SIGINT, &chain->top, nullptr);
  // Where that one has ours as its predecessor, ours must not call it back.
  g_chain.store(find_chain(chain->base, chain->base));
}

}  // namespace

InterruptCounter::InterruptCounter() {
  const std::lock_guard lock(g_mutex);
  if (g_counters++ == 0) install();
}

InterruptCounter::~InterruptCounter() {
  const std::lock_guard lock(g_mutex);
  if (--g_counters == 0) remove();
}

unsigned InterruptCounter::count() { return g_interrupts.load(std::memory_order_relaxed); }

void InterruptCounter::renew() {
  const std::lock_guard lock(g_mutex);
  install();
}

}  // namespace gpusync::cpu

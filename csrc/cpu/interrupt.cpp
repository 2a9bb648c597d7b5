#include "interrupt.h"

#include <csignal>

#include <atomic>
#include <mutex>

namespace gpusync::cpu {
namespace {

std::mutex g_mutex;  // guards installing and removing the handler
int g_watches = 0;
bool g_installed = false;
struct sigaction g_previous;
std::atomic<unsigned> g_interrupts{0};

void on_interrupt(int number, siginfo_t* info, void* context) {
  g_interrupts.fetch_add(1, std::memory_order_relaxed);
  if (g_previous.sa_flags & SA_SIGINFO) {
    g_previous.sa_sigaction(number, info, context);
  } else {
    g_previous.sa_handler(number);
  }
}

bool has_handler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

void install() {
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) != 0 || !has_handler(current)) return;
  g_previous = current;  // before ours can run
  struct sigaction ours = current;
  ours.sa_flags = (current.sa_flags & ~SA_RESTART) | SA_SIGINFO;
  ours.sa_sigaction = on_interrupt;
  g_installed = sigaction(SIGINT, &ours, nullptr) == 0;
}

void remove() {
  struct sigaction current;
  if (!g_installed || sigaction(SIGINT, nullptr, &current) != 0) return;
  // Somebody who replaced the handler meanwhile keeps theirs.
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_interrupt) {
    sigaction(SIGINT, &g_previous, nullptr);
  }
  g_installed = false;
}

}  // namespace

InterruptWatch::InterruptWatch() : m_seen(g_interrupts.load(std::memory_order_relaxed)) {
  const std::lock_guard lock(g_mutex);
  if (g_watches++ == 0) install();
}

InterruptWatch::~InterruptWatch() {
  const std::lock_guard lock(g_mutex);
  if (--g_watches == 0) remove();
}

bool InterruptWatch::interrupted() const { return g_interrupts.load(std::memory_order_relaxed) != m_seen; }

}  // namespace gpusync::cpu

// Ctrl-C during a wait. A wait holds no interpreter lock and may sleep for minutes, so it has to notice
// SIGINT itself; the interpreter's own handler only leaves a note that is read once the op has returned.
#pragma once

namespace gpusync::cpu {

/// While at least one of these lives, SIGINT is counted before the process's own handler gets it. A process
/// that ignores SIGINT, or leaves it at its default, is left alone. Every group has one, because the signal
/// may come before a wait has begun to sleep.
class InterruptCounter {
 public:
  InterruptCounter();
  ~InterruptCounter();
  InterruptCounter(const InterruptCounter&) = delete;
  InterruptCounter& operator=(const InterruptCounter&) = delete;

  /// How many have come: a wait is interrupted when it changes.
  static unsigned count();
  /// To be called before a sleep: counts on when the process has changed its handler since.
  static void renew();
};

}  // namespace gpusync::cpu

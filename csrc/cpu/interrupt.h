// Ctrl-C during a wait. A wait holds no interpreter lock and may sleep for minutes, so it has to notice SIGINT itself;
// the interpreter's own handler only leaves a note that is read once the op has returned.
#pragma once

namespace gpusync::cpu {

/// While at least one InterruptWatch lives, SIGINT is noted here before the process's own handler gets it (one that the
/// process ignores or leaves at its default is left alone). Made only by waits that sleep.
class InterruptWatch {
 public:
  InterruptWatch();
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  /// Has SIGINT come since this watch began?
  bool interrupted() const;

 private:
  unsigned m_seen;
};

}  // namespace gpusync::cpu

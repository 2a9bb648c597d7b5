// Sleeping on a 32-bit word in memory that processes share. (std::atomic::wait of libstdc++ is private to a
// process.)
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdint>

namespace gpusync::cpu {

/// Sleeps while *word == expected, at most `seconds`; returns early for a wake-up, a signal, or no reason.
inline void futex_wait(uint32_t* word, uint32_t expected, double seconds) {
  timespec limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

inline void futex_wake_all(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace gpusync::cpu

// The only loads and stores that touch peer-visible words. One name each, two implementations: PTX at system
// scope on the device, std::atomic_ref on the host.
//
// Device: everything is `.sys`, because a peer may be another GPU and a narrower scope would be a data race
// in the PTX memory model; the "memory" clobber keeps the compiler from moving ordinary accesses across.
// Host: a publish is sequentially consistent whatever its fence, because a rank that publishes then looks
// whether the reader sleeps and whether the group still lives, and those must not be swapped (cpu/wait.h,
// cpu/failure.cpp). So is the acquire: the reader's side of the same two handshakes writes first and reads
// the slot then, and a mere acquire load may overtake that write where the machine has such loads (ARMv8.3).
// The order stands on the operation and not on a separate fence: ThreadSanitizer does not model fences. With
// a host thread for each GPU thread (block.h) both are as on the device, for that is what is tested there.
#pragma once

#include "gpusync/layout.h"

#if !defined(__CUDA_ARCH__)
#include <atomic>
#endif

namespace gpusync {

#if defined(GPUSYNC_HOST_THREADS)
template <bool kFence>
inline constexpr auto kPublishOrder = kFence ? std::memory_order_release : std::memory_order_relaxed;
inline constexpr auto kAcquireOrder = std::memory_order_acquire;
#elif !defined(__CUDA_ARCH__)
template <bool kFence>
inline constexpr auto kPublishOrder = std::memory_order_seq_cst;
inline constexpr auto kAcquireOrder = std::memory_order_seq_cst;
#endif

/// Makes `value` visible to the peer that reads `word`. With kFence, all that this thread (and, behind a
/// block barrier, its block) wrote before is visible to whoever acquires the value.
template <bool kFence>
GPUSYNC_HD void publish(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
  if constexpr (kFence) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  } else {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
#else
  std::atomic_ref<uint64_t>(*word).store(value, kPublishOrder<kFence>);
#endif
}

/// Reads a word that a peer may be writing, without ordering anything: for polling.
GPUSYNC_HD uint64_t observe(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_relaxed);
#endif
}

/// Reads a word and takes over what its publisher had released: once, after polling has seen the value. (An
/// acquire inside the polling loop would invalidate L1 at every turn.)
GPUSYNC_HD uint64_t acquire(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(kAcquireOrder);
#endif
}

}  // namespace gpusync

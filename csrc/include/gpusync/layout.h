// Sizes and limits that both sides of every pad agree on. No other header of gpusync is needed to read them.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define GPUSYNC_HD __host__ __device__ __forceinline__
#else
#define GPUSYNC_HD inline
#endif

namespace gpusync {

/// Ranks of one group; a missing-ranks mask is one 64-bit word.
inline constexpr uint32_t kMaxRanks = 64;

/// Bytes that one store may invalidate at its reader: the unit in which GPUs (and x86 prefetchers) move data.
inline constexpr size_t kLineBytes = 128;

/// Halves of a double buffer: call k works in half k % 2.
inline constexpr uint32_t kHalves = 2;

GPUSYNC_HD constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace gpusync

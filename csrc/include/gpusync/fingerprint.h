// What a rank is doing in a call, in 32 bits: beside the epoch in every slot, so that ranks which call
// different things find out instead of exchanging garbage.
#pragma once

#include "gpusync/layout.h"

namespace gpusync {

enum class Op : uint8_t {
  kNone,
  kBarrier,
  kSignal,
  kWaitSignal,
  kPullStart,
  kPullEnd,
  kPushEpoch,
  kPushExit,
  kPut,
  kGet,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kAllToAll,
  kReduce,
  kUser,  // a call in a kernel of the user's own
};

enum class DType : uint8_t { kNone, kFloat32, kFloat64, kFloat16, kBFloat16, kInt32, kInt64, kOther };
enum class ReduceOp : uint8_t { kSum, kMax, kMin, kAvg };
enum class Algo : uint8_t { kNone, kPullOneShot, kPullTwoShot, kPushOneShot, kPushRmsNorm };

/// The parts of a call on which all ranks must agree.
struct CallKey {
  Op op = Op::kNone;
  bool fence = false;
  DType dtype = DType::kNone;
  ReduceOp reduce_op = ReduceOp::kSum;
  Algo algo = Algo::kNone;
  uint64_t numel = 0;
  uint64_t shape = 0;    // a hash of the sizes, and of a dtype that DType does not tell
  uint32_t root = 0;     // of a broadcast or a reduce
  uint32_t skipped = 0;  // zero-size calls: they advance nothing, yet must not let the ranks slip apart
};

inline constexpr uint64_t kHash = 0x9E3779B97F4A7C15u;

/// op 5 bits, fence 1, dtype 4, reduce_op 3, algo 3 as they are, so that a debugger can read them; the sizes
/// as a 16-bit hash (multiplication by 2^64 / golden ratio, Knuth, The Art of Computer Programming 3,
/// section 6.4).
GPUSYNC_HD constexpr uint32_t fingerprint(const CallKey& key) {
  const uint64_t sizes =
      ((key.numel ^ key.shape) + (uint64_t{key.skipped} << 40) + (uint64_t{key.root} << 32)) * kHash;
  return static_cast<uint32_t>(key.op) << 27 | static_cast<uint32_t>(key.fence) << 26 |
         static_cast<uint32_t>(key.dtype) << 22 | static_cast<uint32_t>(key.reduce_op) << 19 |
         static_cast<uint32_t>(key.algo) << 16 | static_cast<uint32_t>(sizes >> 48);
}

// What of a fingerprint can be read back.
GPUSYNC_HD constexpr Op op_of(uint32_t fingerprint) { return static_cast<Op>(fingerprint >> 27); }
GPUSYNC_HD constexpr bool fence_of(uint32_t fingerprint) { return (fingerprint >> 26 & 1) != 0; }
GPUSYNC_HD constexpr DType dtype_of(uint32_t fingerprint) {
  return static_cast<DType>(fingerprint >> 22 & 0xf);
}
GPUSYNC_HD constexpr ReduceOp reduce_op_of(uint32_t fingerprint) {
  return static_cast<ReduceOp>(fingerprint >> 19 & 7);
}
GPUSYNC_HD constexpr Algo algo_of(uint32_t fingerprint) { return static_cast<Algo>(fingerprint >> 16 & 7); }

inline constexpr uint32_t kUserKeyBits = 19;

/// The fingerprint of a call in a kernel of the user's own: op and fence as above, in 7 bits how many blocks
/// make it (1 to 128), and the user's key: kept as it is below 2^19, else with its upper bits folded in.
GPUSYNC_HD constexpr uint32_t user_key(uint32_t key, uint32_t blocks, bool fence) {
  return static_cast<uint32_t>(Op::kUser) << 27 | static_cast<uint32_t>(fence) << 26 |
         ((blocks - 1) & 0x7f) << kUserKeyBits | ((key ^ key >> kUserKeyBits) & ((1u << kUserKeyBits) - 1));
}
GPUSYNC_HD constexpr uint32_t key_of(uint32_t fingerprint) {
  return fingerprint & ((1u << kUserKeyBits) - 1);
}
GPUSYNC_HD constexpr uint32_t blocks_of(uint32_t fingerprint) {
  return (fingerprint >> kUserKeyBits & 0x7f) + 1;
}

}  // namespace gpusync

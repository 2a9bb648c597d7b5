// What a rank called, kept where its peers can read it: only for error messages and the flight record.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "gpusync/fingerprint.h"

namespace gpusync::cpu {

inline constexpr uint32_t kRecordedDims = 6;

struct CallRecord {
  uint32_t number = 0;  // the rank's calls on this group, from 1
  Op op = Op::kNone;
  DType dtype = DType::kNone;
  ReduceOp reduce_op = ReduceOp::kSum;
  Algo algo = Algo::kNone;
  int16_t channel = -1;  // -1: none (collectives have pads of their own)
  int16_t peer = -1;     // of signal, wait_signal, put, get
  uint8_t ndim = 0;      // of the payload; beyond kRecordedDims only the first are kept
  bool fence = false;
  uint16_t skipped = 0;               // of a collective: how many calls without elements came before
  int64_t sizes[kRecordedDims] = {};  // of a kernel of the user's own: its key and its blocks
};

inline constexpr uint32_t kRecordWords = 8;
static_assert(sizeof(CallRecord) == kRecordWords * sizeof(uint64_t));

/// The record of a call that has a channel or a peer.
inline CallRecord record(Op op, uint32_t channel, bool fence = false, int64_t peer = -1) {
  CallRecord call;
  call.op = op;
  call.channel = static_cast<int16_t>(channel);
  call.peer = static_cast<int16_t>(peer);
  call.fence = fence;
  return call;
}

/// What put, get and collectives work on: `numel` contiguous elements.
struct Payload {
  DType dtype;
  uint64_t numel;
  std::span<const int64_t> sizes;  // of a tensor that outlives the call
};

/// The record of a call that copies a payload to or from `peer`.
CallRecord record(Op op, const Payload& payload, uint32_t peer);

/// The record of a collective.
CallRecord record(const CallKey& key, const Payload& payload);

/// The last calls of one rank. Written by that rank alone, read by anybody at any time: single words are
/// atomic, a record as a whole may be torn, which a message can live with.
class CallRing {
 public:
  static constexpr uint32_t kRecords = 16;

  void write(const CallRecord& record);
  CallRecord read(uint32_t number) const;

 private:
  uint64_t m_words[kRecords][kRecordWords];
};

/// Does it wait for all ranks?
bool is_meeting(Op op);
/// Is it the same call, but for its number?
bool is_alike(const CallRecord& a, const CallRecord& b);

const char* name(Op op);
const char* name(DType dtype);
const char* name(ReduceOp op);
const char* name(Algo algo);

/// For example `811 all_reduce bf16[32, 4096]` without the number: op, payload, then what else tells calls
/// apart.
std::string describe(const CallRecord& record);

}  // namespace gpusync::cpu

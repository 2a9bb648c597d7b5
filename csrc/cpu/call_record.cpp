#include "call_record.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <tuple>

namespace gpusync::cpu {

namespace {

void write_payload(CallRecord& call, const Payload& payload) {
  call.dtype = payload.dtype;
  call.ndim = static_cast<uint8_t>(payload.sizes.size());
  std::copy_n(payload.sizes.begin(), std::min<size_t>(payload.sizes.size(), kRecordedDims), call.sizes);
}

}  // namespace

CallRecord record(Op op, const Payload& payload, uint32_t peer) {
  CallRecord call;
  call.op = op;
  call.peer = static_cast<int16_t>(peer);
  write_payload(call, payload);
  return call;
}

CallRecord record(const CallKey& key, const Payload& payload) {
  CallRecord call;
  call.op = key.op;
  call.reduce_op = key.reduce_op;
  call.algo = key.algo;
  call.skipped = static_cast<uint16_t>(key.skipped);
  write_payload(call, payload);
  return call;
}

void CallRing::write(const CallRecord& record) {
  uint64_t words[kRecordWords];
  std::memcpy(words, &record, sizeof record);
  // Calls without a payload, the frequent ones, fit the first two words.
  const uint32_t used = record.dtype == DType::kNone ? 2 : kRecordWords;
  uint64_t* target = m_words[record.number % kRecords];
  for (uint32_t i = 0; i < used; ++i) {
    std::atomic_ref<uint64_t>(target[i]).store(words[i], std::memory_order_relaxed);
  }
}

CallRecord CallRing::read(uint32_t number) const {
  uint64_t words[kRecordWords];
  auto* source = const_cast<uint64_t*>(m_words[number % kRecords]);
  for (uint32_t i = 0; i < kRecordWords; ++i) {
    words[i] = std::atomic_ref<uint64_t>(source[i]).load(std::memory_order_relaxed);
  }
  CallRecord record;
  std::memcpy(&record, words, sizeof record);
  return record;
}

bool is_meeting(Op op) {
  switch (op) {
    case Op::kNone:
    case Op::kSignal:
    case Op::kWaitSignal:
    case Op::kPushEpoch:
    case Op::kPushExit:
    case Op::kPut:
    case Op::kGet: return false;
    case Op::kBarrier:
    case Op::kPullStart:
    case Op::kPullEnd:
    case Op::kAllReduce:
    case Op::kAllGather:
    case Op::kReduceScatter:
    case Op::kBroadcast:
    case Op::kAllToAll:
    case Op::kReduce:
    case Op::kUser: return true;
  }
  return false;
}

bool is_alike(const CallRecord& a, const CallRecord& b) {
  const auto rest = [](const CallRecord& c) {
    return std::tuple(c.op, c.dtype, c.reduce_op, c.algo, c.channel, c.peer, c.fence, c.ndim);
  };
  // What a call without payload has in its sizes was not written.
  return rest(a) == rest(b) && (a.dtype == DType::kNone || std::ranges::equal(a.sizes, b.sizes));
}

const char* name(Op op) {
  switch (op) {
    case Op::kNone: return "nothing";
    case Op::kBarrier: return "barrier";
    case Op::kSignal: return "signal";
    case Op::kWaitSignal: return "wait_signal";
    case Op::kPullStart: return "pull_start";
    case Op::kPullEnd: return "pull_end";
    case Op::kPushEpoch: return "push_epoch";
    case Op::kPushExit: return "push_exit";
    case Op::kPut: return "put";
    case Op::kGet: return "get";
    case Op::kAllReduce: return "all_reduce";
    case Op::kAllGather: return "all_gather";
    case Op::kReduceScatter: return "reduce_scatter";
    case Op::kBroadcast: return "broadcast";
    case Op::kAllToAll: return "all_to_all";
    case Op::kReduce: return "reduce";
    case Op::kUser: return "user_kernel";
  }
  return "unknown op";
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kNone: return "";
    case DType::kFloat32: return "f32";
    case DType::kFloat64: return "f64";
    case DType::kFloat16: return "f16";
    case DType::kBFloat16: return "bf16";
    case DType::kInt32: return "i32";
    case DType::kInt64: return "i64";
    case DType::kOther: return "bytes";
  }
  return "unknown dtype";
}

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kAvg: return "avg";
  }
  return "unknown reduce_op";
}

const char* name(Algo algo) {
  switch (algo) {
    case Algo::kNone: return "";
    case Algo::kPullOneShot: return "pull_one_shot";
    case Algo::kPullTwoShot: return "pull_two_shot";
    case Algo::kPushOneShot: return "push_one_shot";
    case Algo::kPushRmsNorm: return "push_rms_norm";
  }
  return "unknown algo";
}

std::string describe(const CallRecord& record) {
  std::string text = name(record.op);
  if (record.dtype != DType::kNone) {
    text += std::string(" ") + name(record.dtype) + "[";
    const uint32_t dims = std::min<uint32_t>(record.ndim, kRecordedDims);
    for (uint32_t i = 0; i < dims; ++i) text += (i ? ", " : "") + std::to_string(record.sizes[i]);
    text += record.ndim > kRecordedDims ? ", ...]" : "]";
  }
  if (record.op == Op::kAllReduce || record.op == Op::kReduceScatter || record.op == Op::kReduce)
    text += std::string(" ") + name(record.reduce_op);
  if (record.algo != Algo::kNone) text += std::string(" ") + name(record.algo);
  if (record.skipped != 0) {
    text += " after " + std::to_string(record.skipped) + (record.skipped == 1 ? " call" : " calls") +
            " without elements";
  }
  std::string rest;
  if (record.channel >= 0) rest += "channel=" + std::to_string(record.channel);
  if (record.peer >= 0) rest += (rest.empty() ? "rank=" : ", rank=") + std::to_string(record.peer);
  if (record.op == Op::kUser) {
    rest += (rest.empty() ? "key=" : ", key=") + std::to_string(record.sizes[0]);
    rest += ", blocks=" + std::to_string(record.sizes[1]);
  }
  if (record.op == Op::kBarrier || record.op == Op::kPullEnd || record.op == Op::kUser) {
    rest += record.fence ? ", fence=True" : ", fence=False";
  }
  return rest.empty() ? text : text + "(" + rest + ")";
}

}  // namespace gpusync::cpu

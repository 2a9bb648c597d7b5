// All-reduce through staging memory: every rank copies its input to where its peers can read it.
#include <algorithm>
#include <cstring>

#include "reduce.h"
#include "wait.h"

namespace gpusync::cpu {

CallKey Group::collective_key(const Payload& payload, ReduceOp reduce_op, Algo algo) const {
  return {.op = Op::kAllReduce,
          .dtype = payload.dtype,
          .reduce_op = reduce_op,
          .algo = algo,
          .numel = payload.numel,
          .skipped = m_skipped};
}

void Group::skip(const CallKey& key, const Payload& payload) {
  require_usable(record(key, payload));
  ++m_skipped;
}

void Group::all_reduce(const void* input, void* output, const Payload& payload, ReduceOp reduce_op, Algo algo) {
  const std::lock_guard turn(m_channel_mutex[m_config.channels]);
  const CallKey agreed = collective_key(payload, reduce_op, algo);
  if (payload.numel == 0) {
    skip(agreed, payload);
    return;
  }
  const uint32_t key = fingerprint(agreed);
  CallRecord call = record(agreed, payload);
  begin(call);
  Wait wait(*this, call, all_ranks());
  const size_t item = item_bytes(payload.dtype);
  const uint64_t chunk = m_layout.half_bytes() / item;
  for (uint64_t first = 0; first < payload.numel; first += chunk) {
    const uint64_t count = std::min(chunk, payload.numel - first);
    if (!all_reduce_one_shot(static_cast<const char*>(input) + first * item, static_cast<char*>(output) + first * item,
                             count, payload.dtype, reduce_op, key, wait)) {
      throw_broken(call);
    }
  }
}

/// One chunk, pull one-shot: stage my input, meet, read everybody's. Two staging halves in turn make a barrier at the end
/// needless: I write half k % 2 again in call k + 2, after my wait of call k + 1, where each peer arrived only after it
/// had read call k. Chunks may differ in size from call to call, for each is staged and read whole by one thread.
bool Group::all_reduce_one_shot(const char* input, char* output, uint64_t numel, DType dtype, ReduceOp reduce_op,
                                uint32_t key, Wait& wait) {
  const uint32_t channel_index = m_config.channels;
  const uint32_t half = channel(m_config.rank, channel_index).stages[0].epoch(0) % kHalves;
  std::memcpy(staging(m_config.rank, half), input, numel * item_bytes(dtype));
  if (!m_pull[channel_index].sync<true, true>(key, wait) || !wait.agreed()) return false;
  const void* sources[kMaxRanks];
  for (uint32_t r = 0; r < m_config.world_size; ++r) sources[r] = staging(r, half);
  reduce(output, sources, m_config.world_size, numel, dtype, reduce_op);
  return true;
}

}  // namespace gpusync::cpu

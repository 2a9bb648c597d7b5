// All-reduce through staging memory: every rank copies its input to where its peers can read it. (The other
// collectives are in exchange.cpp.)
#include <algorithm>
#include <cstring>

#include "reduce.h"
#include "wait.h"

namespace gpusync::cpu {

CallKey Group::collective_key(Op op, const Payload& payload, ReduceOp reduce_op, Algo algo) const {
  uint64_t shape = 0;
  for (const int64_t extent : payload.sizes) shape = (shape ^ static_cast<uint64_t>(extent)) * kHash;
  return {.op = op,
          .dtype = payload.dtype,
          .reduce_op = reduce_op,
          .algo = algo,
          .numel = payload.numel,
          .shape = shape,
          .skipped = m_skipped};
}

void Group::skip(const CallKey& key, const Payload& payload) {
  require_usable(record(key, payload));
  ++m_skipped;
}

namespace {

// Where nothing is asked for by name. With two ranks a share is half of the data, and reading the other half
// twice costs less than meeting twice; with more ranks two-shot reads a fraction of what one-shot does.
Algo choose(Algo asked, uint32_t world_size, uint64_t bytes) {
  constexpr uint64_t kTwoShotFrom = 64 << 10;
  if (asked != Algo::kNone) return asked;
  return world_size > 2 && bytes >= kTwoShotFrom ? Algo::kPullTwoShot : Algo::kPullOneShot;
}

constexpr size_t kTwoShotPart = 1 << 20;

}  // namespace

void Group::all_reduce(const void* input, void* output, const Payload& payload, ReduceOp reduce_op,
                       Algo asked) {
  const auto turn = take_turn(m_channel_mutex[m_config.channels]);
  const size_t item = item_bytes(payload.dtype);
  const Algo algo = choose(asked, m_config.world_size, payload.numel * item);
  const CallKey agreed = collective_key(Op::kAllReduce, payload, reduce_op, algo);
  if (payload.numel == 0) {
    skip(agreed, payload);
    return;
  }
  const size_t room = algo == Algo::kPushOneShot   ? push_slot_bytes()
                      : algo == Algo::kPullTwoShot ? std::min(m_layout.half_bytes(), kTwoShotPart)
                                                   : std::min(m_layout.half_bytes(), kOneShotPart);
  const uint64_t chunk = room / item;
  if (chunk == 0) {
    throw std::runtime_error(
        "gpusync: push_one_shot has no room for an element of every rank in the staging memory of group '" +
        m_config.name + "': make the group with buffer_bytes=" +
        std::to_string(kHalves * kLineBytes * m_config.world_size) + " or more");
  }
  CallRecord call = record(agreed, payload);
  begin(call);
  if (m_config.world_size == 1) {  // nobody to meet, and nothing to add
    std::memcpy(output, input, payload.numel * item);
    return;
  }
  Wait wait(*this, call, all_ranks());
  for (uint64_t first = 0; first < payload.numel; first += chunk) {
    const Part part{static_cast<const char*>(input) + first * item,
                    static_cast<char*>(output) + first * item,
                    std::min(chunk, payload.numel - first),
                    payload.dtype,
                    reduce_op,
                    fingerprint(agreed)};
    const bool complete = algo == Algo::kPushOneShot   ? push_one_shot(part, wait)
                          : algo == Algo::kPullTwoShot ? pull_two_shot(part, wait)
                                                       : pull_one_shot(part, wait);
    if (!complete) throw_broken(call);
  }
}

// Each algorithm below works off one part that fits the staging memory, in half k % 2 of it in call k. Two
// halves in turn make a barrier at the end needless: I write half k % 2 again in call k + 2, after my wait of
// call k + 1, where each peer arrived only after it had read call k. All of them meet once in the start
// stage, whose epoch counts the calls, so that they may follow one another in any order. Parts may differ in
// size: each is staged and read whole by one thread.

uint32_t Group::half() const {
  return channel(m_config.rank, m_config.channels).stages[0].epoch(0) % kHalves;
}

size_t Group::push_slot_bytes() const {
  return m_layout.half_bytes() / m_config.world_size / kLineBytes * kLineBytes;
}

/// Stage my input, meet, read everybody's.
bool Group::pull_one_shot(const Part& part, Wait& wait) {
  const uint32_t h = half();
  std::memcpy(staging(m_config.rank, h), part.input, part.numel * item_bytes(part.dtype));
  if (!m_pull[m_config.channels].sync<true, true>(part.key, wait) || !wait.agreed()) return false;
  const void* sources[kMaxRanks];
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    sources[r] = r == m_config.rank ? part.input : staging(r, h);
  }
  reduce(part.output, sources, m_config.world_size, part.numel, part.dtype, part.reduce_op);
  return true;
}

/// Stage my input, meet, reduce my share of everybody's, meet again, read everybody's share. The result takes
/// the place of my input in my staging: that share of it nobody else reads before the second meeting.
bool Group::pull_two_shot(const Part& part, Wait& wait) {
  const uint32_t h = half();
  const uint32_t world_size = m_config.world_size;
  const size_t item = item_bytes(part.dtype);
  const uint64_t share = round_up((part.numel + world_size - 1) / world_size, kLineBytes);
  const auto first_of = [&](uint32_t r) { return std::min<uint64_t>(r * share, part.numel); };
  std::memcpy(staging(m_config.rank, h), part.input, part.numel * item);
  if (!m_pull[m_config.channels].sync<true, true>(part.key, wait)) return false;
  const uint64_t mine = first_of(m_config.rank);
  const uint64_t count = first_of(m_config.rank + 1) - mine;
  const void* sources[kMaxRanks];
  for (uint32_t r = 0; r < world_size; ++r) sources[r] = staging(r, h) + mine * item;
  reduce(staging(m_config.rank, h) + mine * item, sources, world_size, count, part.dtype, part.reduce_op);
  if (!m_pull[m_config.channels].sync<true, false>(part.key, wait) || !wait.agreed()) return false;
  for (uint32_t r = 0; r < world_size; ++r) {
    const uint64_t first = first_of(r);
    std::memcpy(part.output + first * item, staging(r, h) + first * item, (first_of(r + 1) - first) * item);
  }
  return true;
}

/// Write my input into every peer's staging, meet, reduce what is in mine.
bool Group::push_one_shot(const Part& part, Wait& wait) {
  const uint32_t h = half();
  const uint32_t rank = m_config.rank;
  const size_t slot = push_slot_bytes();
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    if (r != rank) std::memcpy(staging(r, h) + rank * slot, part.input, part.numel * item_bytes(part.dtype));
  }
  if (!m_pull[m_config.channels].sync<true, true>(part.key, wait) || !wait.agreed()) return false;
  const void* sources[kMaxRanks];
  for (uint32_t r = 0; r < m_config.world_size; ++r)
    sources[r] = r == rank ? part.input : staging(rank, h) + r * slot;
  reduce(part.output, sources, m_config.world_size, part.numel, part.dtype, part.reduce_op);
  return true;
}

}  // namespace gpusync::cpu

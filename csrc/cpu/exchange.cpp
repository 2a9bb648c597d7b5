// The collectives in which every rank reads a piece of every rank's input: all_gather, broadcast, all_to_all,
// reduce_scatter, and reduce, which is broadcast's gradient. All are one thing: stage, meet, read.
#include <algorithm>
#include <cstring>

#include "reduce.h"
#include "wait.h"

namespace gpusync::cpu {

CallKey Group::exchange_key(const Exchange& what, const Payload& payload) const {
  CallKey key = collective_key(what.op, payload, what.reduce_op, Algo::kNone);
  if (payload.dtype == DType::kOther) key.shape ^= static_cast<uint64_t>(what.scalar_type) * kHash;
  if (what.has_root()) key.root = checked_rank(what.root);
  return key;
}

/// The input is `rows` rows of equal length, one for each rank or one for all. As many columns of them as the
/// staging memory holds are worked off at a time, each row behind the one before.
///
/// This works in half k % 2 of the staging memory in call k and meets in the same stage as the all-reduces
/// do: collectives.cpp says why there is no barrier at the end.
void Group::exchange(const Exchange& what, const void* input, void* output, const Payload& payload) {
  const auto turn = take_turn(m_channel_mutex[m_config.channels]);
  const CallKey key = exchange_key(what, payload);
  if (payload.numel == 0) {
    skip(key, payload);
    return;
  }
  const uint32_t rank = m_config.rank;
  const uint32_t world_size = m_config.world_size;
  const size_t item = what.item_bytes;
  const uint32_t rows = what.is_split() ? world_size : 1;
  const uint32_t my_row = rows == 1 ? 0 : rank;
  const uint64_t columns = payload.numel / rows;
  // At least one: a half is a page or more, and no element has more than 16 bytes.
  const uint64_t chunk = std::min(m_layout.half_bytes(), kOneShotPart) / rows / item;
  const bool is_read = what.op != Op::kBroadcast || key.root == rank;
  CallRecord call = record(key, payload);
  if (what.has_root()) call.peer = static_cast<int16_t>(key.root);
  begin(call);
  if (world_size == 1) {
    std::memcpy(output, input, payload.numel * item);
    return;
  }
  Wait wait(*this, call, all_ranks());
  for (uint64_t first = 0; first < columns; first += chunk) {
    const uint64_t count = std::min(chunk, columns - first);
    const uint32_t h = half();
    const auto* mine = static_cast<const char*>(input) + first * item;
    for (uint32_t row = 0; is_read && row < rows; ++row) {
      if (rows != 1 && row == rank) continue;  // mine, and read where it lies
      std::memcpy(staging(rank, h) + row * count * item, mine + row * columns * item, count * item);
    }
    if (!m_pull[m_config.channels].sync<true, true>(fingerprint(key), wait) || !wait.agreed()) {
      throw_broken(call);
    }
    const void* pieces[kMaxRanks];
    for (uint32_t r = 0; r < world_size; ++r) {
      pieces[r] = r == rank ? mine + my_row * columns * item : staging(r, h) + my_row * count * item;
    }
    auto* const target = static_cast<char*>(output) + first * item;
    if (what.op == Op::kReduce && key.root != rank) {
      std::memset(target, 0, count * item);
    } else if (what.reduces()) {
      reduce(target, pieces, world_size, count, payload.dtype, what.reduce_op);
    } else if (what.op == Op::kBroadcast) {
      std::memcpy(target, pieces[key.root], count * item);
    } else {
      for (uint32_t r = 0; r < world_size; ++r)
        std::memcpy(target + r * columns * item, pieces[r], count * item);
    }
  }
}

}  // namespace gpusync::cpu

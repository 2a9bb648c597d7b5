// One verified round of each kind. Messages are plain memory: where the protocol did not order them,
// ThreadSanitizer reports a race, and without it an old or a torn message fails the comparison.
//
// Two halves in turn do for messages that are written before a point where all ranks meet: half k % 2 is
// written again in round k+2, and whoever gets there has met everybody in round k+1, after they had read in
// round k. So there is no second meeting at a round's end, and ranks drift as far apart as the protocol lets
// them.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu/half_types.h"
#include "stress.h"

namespace stress {
namespace {

using gpusync::Algo;
using gpusync::DType;
using gpusync::kMaxRanks;
using gpusync::Op;
using gpusync::ReduceOp;

// Where each kind keeps its messages on a rank's board, in words. Messages have kWords words, kLine apart.
constexpr uint64_t kWords = 4;
constexpr uint64_t kLine = gpusync::kLineBytes / sizeof(uint64_t);
constexpr uint64_t kBarrierAt = 0;
constexpr uint64_t kPullAt = 4 * kLine;
constexpr uint64_t kSignalAt = 8 * kLine;
constexpr uint64_t kPingAt = 12 * kLine;
constexpr uint64_t kPushAt = 16 * kLine;  // [half][source]
static_assert(kPushAt + 2 * kMaxRanks * kLine <= Rank::kBoardWords);

enum Kind : uint64_t {
  kBarrierKind = 1,
  kPullKind,
  kSignalKind,
  kPingKind,
  kPushKind,
  kReduceKind,
  kExchangeKind
};

uint64_t value(Kind kind, uint64_t rank, uint64_t round, uint64_t index) {
  return mix(kind << 32 | rank, round, index);
}

void compose(uint64_t* message, Kind kind, uint64_t rank, uint64_t round) {
  for (uint64_t i = 0; i < kWords; ++i) message[i] = value(kind, rank, round, i);
}

void verify(const Rank& rank, const uint64_t* message, Kind kind, uint32_t from, uint64_t round,
            const char* what) {
  for (uint64_t i = 0; i < kWords; ++i) rank.expect(message[i], value(kind, from, round, i), what, from);
}

/// How many signals `source` sends to `destination` in this round.
uint64_t signals_due(uint64_t source, uint64_t destination, uint64_t round) {
  return 1 + mix(source, destination, round) % 3;
}

// Elements of all-reduces are small integers, so that sums are exact in every dtype: 64 ranks times 3 is
// below the 256 up to which bf16 counts.
uint64_t element(uint64_t rank, uint64_t round, uint64_t index) {
  return (rank * 7 + round * 13 + index * 5) >> 1 & 3;
}

template <class T>
T from_integer(uint64_t x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(x);
  } else {
    T out;
    cpu::from_float(static_cast<float>(x), out);
    return out;
  }
}

template <class T>
bool same(T a, T b) {
  if constexpr (std::is_arithmetic_v<T>) {
    return a == b;
  } else {
    return a.bits == b.bits;
  }
}

template <class T>
void reduce_and_verify(Rank& rank, cpu::Group& group, uint64_t numel, DType dtype, ReduceOp op, Algo algo,
                       uint64_t round) {
  std::vector<T> input(numel);
  std::vector<T> output(numel);
  for (uint64_t i = 0; i < numel; ++i) input[i] = from_integer<T>(element(rank.id(), round, i));
  const int64_t sizes[] = {static_cast<int64_t>(numel)};
  const cpu::Payload payload{dtype, numel, sizes};
  rank.pause();
  group.all_reduce(input.data(), output.data(), payload, op, algo);
  for (uint64_t i = 0; i < numel; ++i) {
    uint64_t expected = element(0, round, i);
    for (uint32_t r = 1; r < rank.ranks(); ++r) {
      const uint64_t next = element(r, round, i);
      expected = op == ReduceOp::kSum
                     ? expected + next
                     : (op == ReduceOp::kMax ? std::max(expected, next) : std::min(expected, next));
    }
    if (!same(output[i], from_integer<T>(expected))) {
      rank.fail("all_reduce %lu: element %lu of %lu is wrong", static_cast<unsigned long>(round),
                static_cast<unsigned long>(i), static_cast<unsigned long>(numel));
    }
  }
}

/// Element i of the piece of `from`'s input that is meant for `to`.
uint64_t piece(uint32_t from, uint32_t to, uint64_t round, uint64_t i) {
  return value(kExchangeKind, from * kMaxRanks + to, round, i);
}

}  // namespace

Rounds::Rounds(Rank& rank, cpu::Group& group) : m_rank(rank), m_group(group) {
  cpu::Buffer buffer;
  buffer.name = "push";
  buffer.dtype = DType::kInt64;
  buffer.scalar_type = 0;
  buffer.item_bytes = sizeof(uint64_t);
  buffer.numel = gpusync::kHalves * kMaxRanks * kLine;
  buffer.shape = {static_cast<int64_t>(buffer.numel)};
  buffer.base = reinterpret_cast<char*>(rank.board(0) + kPushAt);
  buffer.stride = Rank::kBoardWords * sizeof(uint64_t);
  group.add_buffer(std::move(buffer));
}

void Rounds::barrier(int64_t channel) {
  const uint64_t k = m_barriers++;
  const uint64_t at = kBarrierAt + k % 2 * kLine;
  compose(m_rank.board(m_rank.id()) + at, kBarrierKind, m_rank.id(), k);
  m_rank.pause();
  m_rank.timed([&] { m_group.barrier(channel, true); });
  m_rank.pause();
  for (uint32_t r = 0; r < m_rank.ranks(); ++r) {
    verify(m_rank, m_rank.board(r) + at, kBarrierKind, r, k, "message behind a barrier");
  }
}

void Rounds::pull(int64_t channel, bool fence) {
  const uint64_t k = m_pulls++;
  compose(m_rank.board(m_rank.id()) + kPullAt, kPullKind, m_rank.id(), k);
  m_rank.pause();
  m_group.pull_start(channel);
  for (uint32_t i = 0; i < m_rank.ranks(); ++i) {
    m_rank.pause();
    const uint32_t r = (m_rank.id() + i) % m_rank.ranks();
    verify(m_rank, m_rank.board(r) + kPullAt, kPullKind, r, k, "message between pull_start and pull_end");
  }
  m_group.pull_end(channel, fence);
}

void Rounds::push(int64_t channel) {
  const uint64_t k = m_pushes++;
  const cpu::Buffer& buffer = m_group.buffer("push");
  const int64_t sizes[] = {kWords};
  const cpu::Payload payload{DType::kInt64, kWords, sizes};
  const uint64_t half = m_group.push_epoch(channel);
  std::array<uint64_t, kWords> message;
  for (uint32_t i = 0; i < m_rank.ranks(); ++i) {
    m_rank.pause();
    const uint32_t destination = (m_rank.id() + i) % m_rank.ranks();
    compose(message.data(), kPushKind, m_rank.id() * kMaxRanks + destination, k);
    const uint64_t offset = (half * kMaxRanks + m_rank.id()) * kLine;
    m_group.put(buffer, destination, static_cast<int64_t>(offset), message.data(), payload);
    m_group.signal(destination, channel);
  }
  for (uint32_t source = 0; source < m_rank.ranks(); ++source) m_group.wait_signal(source, channel);
  for (uint32_t source = 0; source < m_rank.ranks(); ++source) {
    m_rank.pause();
    m_group.get(buffer, -1, static_cast<int64_t>((half * kMaxRanks + source) * kLine), message.data(),
                payload);
    for (uint64_t i = 0; i < kWords; ++i) {
      const uint64_t expected = value(kPushKind, source * kMaxRanks + m_rank.id(), k, i);
      m_rank.expect(message[i], expected, "pushed message", source);
    }
  }
  m_group.push_exit(channel);
}

void Rounds::signal_all(int64_t channel) {
  const uint64_t k = m_signals++;
  const uint64_t at = kSignalAt + k % 2 * kLine;
  compose(m_rank.board(m_rank.id()) + at, kSignalKind, m_rank.id(), k);
  for (uint32_t i = 0; i < m_rank.ranks(); ++i) {
    const uint32_t destination = (m_rank.id() + i) % m_rank.ranks();
    for (uint64_t n = signals_due(m_rank.id(), destination, k); n > 0; --n) {
      m_rank.pause();
      m_group.signal(destination, channel);
    }
  }
  const auto first = static_cast<uint32_t>(m_rank.random(m_rank.ranks()));
  for (uint32_t i = 0; i < m_rank.ranks(); ++i) {
    const uint32_t source = (first + i) % m_rank.ranks();
    for (uint64_t n = signals_due(source, m_rank.id(), k); n > 0; --n) m_group.wait_signal(source, channel);
    verify(m_rank, m_rank.board(source) + at, kSignalKind, source, k, "message behind a signal");
  }
}

void Rounds::ping_pong(int64_t channel) {
  const uint64_t k = m_games++;
  const uint32_t partner = m_rank.id() ^ 1;
  if (partner >= m_rank.ranks()) return;
  uint64_t* mine = m_rank.board(m_rank.id()) + kPingAt;
  const uint64_t* theirs = m_rank.board(partner) + kPingAt;
  const bool begins = m_rank.id() < partner;
  for (int step = 0; step < 2; ++step) {
    m_rank.pause();
    if ((step == 0) == begins) {
      compose(mine, kPingKind, m_rank.id(), k);
      m_group.signal(partner, channel);
    } else {
      m_group.wait_signal(partner, channel);
      verify(m_rank, theirs, kPingKind, partner, k, "ping-pong message");
    }
  }
}

void Rounds::ring(int64_t channel) {
  const uint64_t k = m_rings++;
  const uint32_t left = (m_rank.id() + m_rank.ranks() - 1) % m_rank.ranks();
  const uint32_t right = (m_rank.id() + 1) % m_rank.ranks();
  const auto receive = [&] {
    m_group.wait_signal(left, channel);
    verify(m_rank, m_rank.board(left) + kPingAt, kPingKind, left, k, "message in a ring");
  };
  if (m_rank.id() != 0) receive();
  Rank::spin_until(Rank::seconds() +
                   1e-6 * static_cast<double>(m_rank.random(1 + m_rank.options().delay_us)));
  compose(m_rank.board(m_rank.id()) + kPingAt, kPingKind, m_rank.id(), k);
  m_group.signal(right, channel);
  if (m_rank.id() == 0) receive();
}

void Rounds::all_reduce(uint64_t numel, DType dtype, ReduceOp op, Algo algo) {
  const uint64_t k = m_reductions++;
  switch (dtype) {
    case DType::kFloat32: return reduce_and_verify<float>(m_rank, m_group, numel, dtype, op, algo, k);
    case DType::kFloat64: return reduce_and_verify<double>(m_rank, m_group, numel, dtype, op, algo, k);
    case DType::kFloat16: return reduce_and_verify<cpu::Float16>(m_rank, m_group, numel, dtype, op, algo, k);
    case DType::kBFloat16:
      return reduce_and_verify<cpu::BFloat16>(m_rank, m_group, numel, dtype, op, algo, k);
    case DType::kInt32: return reduce_and_verify<int32_t>(m_rank, m_group, numel, dtype, op, algo, k);
    default: return reduce_and_verify<int64_t>(m_rank, m_group, numel, DType::kInt64, op, algo, k);
  }
}

void Rounds::exchange(Op op, uint64_t columns) {
  const uint64_t k = m_exchanges++;
  const uint32_t me = m_rank.id();
  const uint32_t ranks = m_rank.ranks();
  const auto root = static_cast<uint32_t>(k % ranks);
  const cpu::Exchange what{op, sizeof(uint64_t), 0, ReduceOp::kSum, root};
  const uint64_t rows = what.is_split() ? ranks : 1;
  std::vector<uint64_t> input(rows * columns);
  std::vector<uint64_t> output(columns * (what.reduces() || op == Op::kBroadcast ? 1 : ranks));
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t i = 0; i < columns; ++i) {
      input[row * columns + i] = piece(me, static_cast<uint32_t>(rows == 1 ? 0 : row), k, i);
    }
  }
  const int64_t sizes[] = {static_cast<int64_t>(rows), static_cast<int64_t>(columns)};
  m_rank.pause();
  m_group.exchange(what, input.data(), output.data(), {DType::kInt64, input.size(), sizes});
  const uint32_t mine = rows == 1 ? 0 : me;
  for (uint64_t i = 0; i < output.size(); ++i) {
    uint64_t expected = 0;
    if (op == Op::kBroadcast) {
      expected = piece(root, 0, k, i);
    } else if (!what.reduces()) {
      expected = piece(static_cast<uint32_t>(i / columns), mine, k, i % columns);
    } else if (op == Op::kReduceScatter || me == root) {
      for (uint32_t r = 0; r < ranks; ++r) expected += piece(r, mine, k, i);
    }
    if (output[i] != expected) {
      m_rank.fail("exchange %lu: element %lu of %lu is wrong", static_cast<unsigned long>(k),
                  static_cast<unsigned long>(i), static_cast<unsigned long>(output.size()));
    }
  }
}

}  // namespace stress

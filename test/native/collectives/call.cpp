#include "call.h"

#include <cstring>

#include "cpu/reduce.h"
#include "cuda/kernels.h"

namespace collectives {
namespace {

struct Kind {
  Op op;
  Algo algo;
};
constexpr Kind kKindOf[] = {{Op::kAllReduce, Algo::kPullOneShot}, {Op::kAllReduce, Algo::kPullTwoShot},
                            {Op::kAllReduce, Algo::kPushOneShot}, {Op::kAllGather, Algo::kNone},
                            {Op::kBroadcast, Algo::kNone},        {Op::kAllToAll, Algo::kNone},
                            {Op::kReduceScatter, Algo::kNone},    {Op::kReduce, Algo::kNone}};
static_assert(std::size(kKindOf) == std::size(kKinds));

constexpr DType kDTypes[] = {DType::kFloat32, DType::kInt32,   DType::kBFloat16,
                             DType::kFloat16, DType::kFloat64, DType::kInt64};

constexpr char kUntouched = static_cast<char>(0xa5);

/// A finite number of middling size, as its bits; sums over 64 ranks neither overflow nor are exact.
uint64_t number(Random& random, DType dtype) {
  const uint64_t bits = random.next();
  const auto floating = [bits](uint32_t width, uint32_t mantissa, uint64_t bias) {
    const uint64_t exponent = bias - 4 + (bits >> 56) % 8;
    return (bits >> 55 & 1) << (width - 1) | exponent << mantissa | (bits & ((uint64_t{1} << mantissa) - 1));
  };
  switch (dtype) {
    case DType::kFloat32: return floating(32, 23, 127);
    case DType::kFloat64: return floating(64, 52, 1023);
    case DType::kFloat16: return floating(16, 10, 15);
    case DType::kBFloat16: return floating(16, 7, 127);
    case DType::kInt32: return static_cast<uint64_t>(static_cast<int32_t>(bits) / 64);
    case DType::kInt64: return static_cast<uint64_t>(static_cast<int64_t>(bits) / 64);
    case DType::kNone:
    case DType::kOther: break;
  }
  return bits;
}

bool is_poison(const char* data, uint64_t poison, size_t bytes) {
  return std::memcmp(data, &poison, bytes) == 0;
}

}  // namespace

Tensor::Tensor(size_t bytes, size_t margin) : m_margin(margin), m_memory(allocate(margin + bytes, 16)) {
  std::memset(m_memory.get(), kUntouched, margin + bytes);
}

bool Tensor::margin_is_untouched() const {
  return std::all_of(m_memory.get(), data(), [](char byte) { return byte == kUntouched; });
}

Call::Call(Random& random, const Limits& limits, uint32_t world_size)
    : m_kind(limits.kind < kAnyKind ? limits.kind : static_cast<uint32_t>(random.below(kAnyKind))),
      m_world_size(world_size) {
  const auto [op, algo] = kKindOf[m_kind];
  m_what.op = op;
  m_key = {.op = op, .dtype = DType::kOther, .algo = algo};
  if (reduces()) {
    m_key.dtype = kDTypes[random.below(limits.dtypes)];
    const bool integral = m_key.dtype == DType::kInt32 || m_key.dtype == DType::kInt64;
    if (random.one_in(2)) m_key.reduce_op = static_cast<ReduceOp>(random.below(integral ? 3 : 4));
    m_what.item_bytes = cpu::item_bytes(m_key.dtype);
    m_poison = cuda::poison_of(m_key.dtype);
  } else {
    m_what.item_bytes = size_t{1} << random.below(5);
    m_poison = 0x0101010101010101u * (1 + random.below(255));
  }
  m_what.reduce_op = m_key.reduce_op;
  if (m_what.has_root()) m_key.root = static_cast<uint32_t>(random.below(world_size));
  m_push = random.one_in(2);
  const uint64_t most = random.one_in(2) ? 3000 : 300;  // bytes
  m_key.numel = 1 + random.below(most / m_what.item_bytes);
  if (m_what.is_split()) m_key.numel = (1 + m_key.numel / world_size) * world_size;
  draw_data(random, limits);
}

Call::Call(Random& random, const Limits& limits, const Call& like)
    : m_kind(like.m_kind),
      m_world_size(like.m_world_size),
      m_key(like.m_key),
      m_what(like.m_what),
      m_poison(like.m_poison),
      m_push(like.m_push) {
  draw_data(random, limits);
}

void Call::draw_data(Random& random, const Limits& limits) {
  m_width = {1 + static_cast<uint32_t>(random.below(limits.blocks)),
             random.one_in(2) ? limits.threads : 1 + static_cast<uint32_t>(random.below(limits.threads))};
  const size_t item = m_what.item_bytes;
  const size_t bytes = m_key.numel * item;
  const auto margin = [&] {
    return random.one_in(2) ? 16 : random.below(std::max<size_t>(16 / item, 1)) * item;
  };
  for (uint32_t r = 0; r < m_world_size; ++r) fill(random, m_inputs.emplace_back(bytes, margin()).data());
  for (uint32_t r = 0; r < m_world_size; ++r) {
    m_expected.push_back(expected(r));
    m_outputs.emplace_back(m_expected[r].size(), margin());
  }
}

void Call::fill(Random& random, char* data) const {
  const size_t bytes = unit();
  for (size_t at = 0; at < m_key.numel * m_what.item_bytes; at += bytes) {
    const uint64_t word = number(random, m_key.dtype);
    std::memcpy(data + at, &word, bytes);
  }
}

std::vector<char> Call::expected(uint32_t rank) const {
  const size_t bytes = m_key.numel * m_what.item_bytes;
  const size_t row = bytes / m_world_size;
  const auto reduced = [&](size_t first, size_t size) {
    std::vector<char> result(size);
    const void* sources[kMaxRanks];
    std::vector<std::vector<char>> aligned;
    for (uint32_t r = 0; r < m_world_size; ++r) {
      const char* from = m_inputs[r].data() + first;
      sources[r] = aligned.emplace_back(from, from + size).data();
    }
    cpu::reduce(result.data(), sources, m_world_size, size / m_what.item_bytes, m_key.dtype, m_key.reduce_op);
    return result;
  };
  const auto copied = [&](size_t size, auto&& source) {
    std::vector<char> result;
    for (uint32_t r = 0; r < m_world_size; ++r) {
      const char* from = source(r);
      result.insert(result.end(), from, from + size);
    }
    return result;
  };
  switch (m_key.op) {
    case Op::kAllReduce: return reduced(0, bytes);
    case Op::kReduce: return rank == m_key.root ? reduced(0, bytes) : std::vector<char>(bytes);
    case Op::kReduceScatter: return reduced(rank * row, row);
    case Op::kAllGather: return copied(bytes, [&](uint32_t r) { return m_inputs[r].data(); });
    case Op::kAllToAll: return copied(row, [&](uint32_t r) { return m_inputs[r].data() + rank * row; });
    default: break;
  }
  const char* from = m_inputs[m_key.root].data();
  return std::vector<char>(from, from + bytes);
}

std::vector<Call::Launch> Call::launches(const cuda::Seat& seat, bool another) const {
  const uint32_t rank = seat.pull.rank();
  CallKey key = m_key;
  key.skipped = another ? 1 : 0;
  const void* input = m_inputs[rank].data();
  char* output = m_outputs[rank].data();
  std::vector<Launch> result;
  if (key.op == Op::kAllReduce) {
    const auto kernel = cuda::kernel_of(key.algo, key.dtype, key.reduce_op, m_world_size);
    cuda::each_launch(seat, key, input, output, m_width,
                      [&](const cuda::AllReduceParams& params, uint32_t blocks) {
                        result.push_back({[=] { kernel(params); },
                                          blocks,
                                          {{static_cast<const char*>(params.output), params.numel}},
                                          key.algo == Algo::kPullTwoShot ? params.groups : ~uint64_t{0},
                                          key.algo == Algo::kPushOneShot});
                      });
    return result;
  }
  const bool push = m_push && cuda::can_push(seat, key, m_what);
  const auto kernel = cuda::kernel_of(seat, key, m_what, push);
  cuda::each_launch(
      seat, key, m_what, push, m_poison, input, output, m_width,
      [&](const cuda::ExchangeParams& params, uint32_t blocks) {
        Launch launch{[=] { kernel(params); }, blocks, {}, ~uint64_t{0}, push};
        const bool rows = key.op == Op::kAllGather || key.op == Op::kAllToAll;
        for (uint32_t r = 0; r < (rows ? m_world_size : 1); ++r) {
          launch.parts.push_back(
              {static_cast<const char*>(params.output) + r * params.columns * unit(), params.numel});
        }
        result.push_back(std::move(launch));
      });
  return result;
}

std::string Call::check(uint32_t rank, const Launch& launch, Outcome outcome) const {
  const bool push = launch.pushed;
  const uint32_t threads = launch.blocks * m_width.threads;
  struct Share {
    bool right = true;
    bool poison = true;
  };
  std::vector<Share> shares(push ? threads : launch.blocks);
  for (const Part& part : launch.parts) {
    const char* wanted = m_expected[rank].data() + (part.data - m_outputs[rank].data());
    for (uint64_t i = 0; i < part.numel; ++i) {
      const size_t at = i * unit();
      const uint64_t thread = at / (push ? 8 : 16) % launch.period % threads;
      Share& share = shares[push ? thread : thread / m_width.threads];
      share.right = share.right && std::memcmp(part.data + at, wanted + at, unit()) == 0;
      share.poison = share.poison && is_poison(part.data + at, m_poison, unit());
    }
  }
  for (size_t s = 0; s < shares.size(); ++s) {
    const Share& share = shares[s];
    const bool good = outcome == Outcome::kRight    ? share.right
                      : outcome == Outcome::kPoison ? share.poison
                                                    : share.right || share.poison;
    if (good) continue;
    return name() + ": the output of rank " + std::to_string(rank) + (push ? ", thread " : ", block ") +
           std::to_string(s) + " is " +
           (share.right    ? "right"
            : share.poison ? "poison"
                           : "wrong");
  }
  return m_outputs[rank].margin_is_untouched() ? "" : name() + ": the margin of an output was written to";
}

std::string Call::name() const {
  return std::string(kKinds[m_kind]) + " of " + std::to_string(m_key.numel) + " x " +
         std::to_string(m_what.item_bytes) + " bytes (dtype " +
         std::to_string(static_cast<int>(m_key.dtype)) + ", op " +
         std::to_string(static_cast<int>(m_key.reduce_op)) + ") in " + std::to_string(m_width.blocks) +
         " x " + std::to_string(m_width.threads) + " threads" + (m_push ? ", pushed if it can be" : "");
}

}  // namespace collectives

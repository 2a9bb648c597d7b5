#include "call.h"

#include <cmath>
#include <cstring>

#include "cpu/half_types.h"
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
                            {Op::kReduceScatter, Algo::kNone},    {Op::kReduce, Algo::kNone},
                            {Op::kAllReduce, Algo::kPushRmsNorm}};
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

float value_of(const char* data, DType dtype) {
  const auto read = [data]<class T>(T value) {
    std::memcpy(&value, data, sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::kFloat16: return cpu::to_float(read(cpu::Float16{}));
    case DType::kBFloat16: return cpu::to_float(read(cpu::BFloat16{}));
    default: return read(float{});
  }
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
    if (algo == Algo::kPushRmsNorm && (integral || m_key.dtype == DType::kFloat64))
      m_key.dtype = DType::kFloat32;
    if (random.one_in(2) && algo != Algo::kPushRmsNorm)
      m_key.reduce_op = static_cast<ReduceOp>(random.below(integral ? 3 : 4));
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
  if (algo == Algo::kPushRmsNorm) {
    m_columns =
        (1 + random.below(8)) * 8 / m_what.item_bytes;  // as much as fits into the smallest slot of 8 ranks
    m_key.numel = (1 + random.below(6)) * m_columns;
    m_eps = random.one_in(2) ? 0 : 0.5f;
    m_weight_bias = random.one_in(2) ? 0 : 1;
  }
  draw_data(random, limits);
}

Call::Call(Random& random, const Limits& limits, const Call& like)
    : m_kind(like.m_kind),
      m_world_size(like.m_world_size),
      m_key(like.m_key),
      m_what(like.m_what),
      m_poison(like.m_poison),
      m_push(like.m_push),
      m_columns(like.m_columns),
      m_eps(like.m_eps),
      m_weight_bias(like.m_weight_bias) {
  draw_data(random, limits);
}

void Call::draw_data(Random& random, const Limits& limits) {
  m_width = {1 + static_cast<uint32_t>(random.below(limits.blocks)),
             random.one_in(2) ? limits.threads : 1 + static_cast<uint32_t>(random.below(limits.threads))};
  if (m_columns != 0) m_row_blocks = 1 + static_cast<uint32_t>(random.below(m_width.blocks));
  const size_t item = m_what.item_bytes;
  const size_t bytes = m_key.numel * item;
  const auto margin = [&] {
    return random.one_in(2) ? 16 : random.below(std::max<size_t>(16 / item, 1)) * item;
  };
  for (uint32_t r = 0; r < m_world_size; ++r)
    fill(random, m_inputs.emplace_back(bytes, margin()).data(), bytes);
  for (uint32_t r = 0; r < m_world_size && m_columns != 0; ++r) {
    fill(random, m_residuals.emplace_back(bytes, margin()).data(), bytes);
    fill(random, m_weights.emplace_back(m_columns * item, margin()).data(), m_columns * item);
  }
  for (uint32_t r = 0; r < m_world_size; ++r) {
    m_expected.push_back(expected(r));
    m_outputs.emplace_back(m_columns != 0 ? 2 * bytes : m_expected[r].size(), margin());
  }
}

void Call::fill(Random& random, char* data, size_t bytes) const {
  for (size_t at = 0; at < bytes; at += unit()) {
    const uint64_t word = number(random, m_key.dtype);
    std::memcpy(data + at, &word, unit());
  }
}

/// `size` bytes from `first` on of all inputs.
std::vector<char> Call::reduced(size_t first, size_t size) const {
  std::vector<char> result(size);
  const void* sources[kMaxRanks];
  std::vector<std::vector<char>> aligned;
  for (uint32_t r = 0; r < m_world_size; ++r) {
    const char* from = m_inputs[r].data() + first;
    sources[r] = aligned.emplace_back(from, from + size).data();
  }
  cpu::reduce(result.data(), sources, m_world_size, size / m_what.item_bytes, m_key.dtype, m_key.reduce_op);
  return result;
}

/// The residual added, and behind that its norm: exact, as fp32 and not rounded to the dtype.
std::vector<char> Call::with_norm(std::vector<char> reduced, uint32_t rank) const {
  const size_t item = m_what.item_bytes;
  const std::vector<char> residual(m_residuals[rank].data(), m_residuals[rank].data() + reduced.size());
  const void* both[] = {residual.data(), reduced.data()};
  std::vector<char> result(reduced.size());
  cpu::reduce(result.data(), both, 2, m_key.numel, m_key.dtype, ReduceOp::kSum);
  for (uint64_t row = 0; row < m_key.numel; row += m_columns) {
    const auto value = [&](uint64_t column) {
      return double{value_of(result.data() + (row + column) * item, m_key.dtype)};
    };
    double squares = 0;
    for (uint64_t c = 0; c < m_columns; ++c) squares += value(c) * value(c);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(m_columns) + m_eps);
    for (uint64_t c = 0; c < m_columns; ++c) {
      const double by = double{value_of(m_weights[rank].data() + c * item, m_key.dtype)} + m_weight_bias;
      const auto norm = static_cast<float>(value(c) * scale * by);
      const char* bytes = reinterpret_cast<const char*>(&norm);
      result.insert(result.end(), bytes, bytes + sizeof norm);
    }
  }
  return result;
}

std::vector<char> Call::expected(uint32_t rank) const {
  const size_t bytes = m_key.numel * m_what.item_bytes;
  const size_t row = bytes / m_world_size;
  const auto copied = [&](size_t size, auto&& source) {
    std::vector<char> result;
    for (uint32_t r = 0; r < m_world_size; ++r) {
      const char* from = source(r);
      result.insert(result.end(), from, from + size);
    }
    return result;
  };
  switch (m_key.op) {
    case Op::kAllReduce: return m_columns != 0 ? with_norm(reduced(0, bytes), rank) : reduced(0, bytes);
    case Op::kReduce: return rank == m_key.root ? reduced(0, bytes) : std::vector<char>(bytes);
    case Op::kReduceScatter: return reduced(rank * row, row);
    case Op::kAllGather: return copied(bytes, [&](uint32_t r) { return m_inputs[r].data(); });
    case Op::kAllToAll: return copied(row, [&](uint32_t r) { return m_inputs[r].data() + rank * row; });
    default: break;
  }
  const char* from = m_inputs[m_key.root].data();
  return std::vector<char>(from, from + bytes);
}

/// The shares of packs that are dealt out to blocks, or pushed ones to threads, anew after `period` of them.
std::function<uint64_t(size_t byte)> Call::dealt(uint32_t blocks, bool push, uint64_t period) const {
  const uint32_t threads = blocks * m_width.threads;
  const uint64_t unit = push ? 8 : 16;  // bytes
  const uint64_t of_a_share = push ? 1 : m_width.threads;
  return [=](size_t byte) { return byte / unit % period % threads / of_a_share; };
}

/// Behind the shares of the sum, each as small as what is pushed at a time, there is one for the norm of each
/// row.
Call::Launch Call::rms_norm(const cuda::RmsNormParams& params, uint32_t blocks) const {
  const size_t row_bytes = m_columns * m_what.item_bytes;
  const uint64_t parcels = params.groups;
  return {[params, kernel = cuda::push_rms_norm(m_key.dtype, m_world_size)] { kernel(params); },
          blocks,
          m_row_blocks,
          parcels + blocks / m_row_blocks,
          {{static_cast<const char*>(params.output), params.numel, [](size_t byte) { return byte / 8; }},
           {static_cast<const char*>(params.norm), params.numel,
            [=](size_t byte) { return parcels + byte / row_bytes; }}}};
}

std::vector<Call::Launch> Call::launches(const cuda::Seat& seat, bool another) const {
  const uint32_t rank = seat.pull.rank();
  CallKey key = m_key;
  key.skipped = another ? 1 : 0;
  const void* input = m_inputs[rank].data();
  char* output = m_outputs[rank].data();
  std::vector<Launch> result;
  if (m_columns != 0) {
    const cuda::RmsNorm what{m_residuals[rank].data(),
                             m_weights[rank].data(),
                             output + m_key.numel * m_what.item_bytes,
                             m_columns,
                             m_eps,
                             m_weight_bias};
    cuda::each_launch(seat, key, what, m_row_blocks, input, output, m_width,
                      [&](const cuda::RmsNormParams& params, uint32_t blocks) {
                        result.push_back(rms_norm(params, blocks));
                      });
    return result;
  }
  if (key.op == Op::kAllReduce) {
    const auto kernel = cuda::kernel_of(key.algo, key.dtype, key.reduce_op, m_world_size);
    const bool push = key.algo == Algo::kPushOneShot;
    cuda::each_launch(
        seat, key, input, output, m_width, [&](const cuda::AllReduceParams& params, uint32_t blocks) {
          const uint64_t period = key.algo == Algo::kPullTwoShot ? params.groups : ~uint64_t{0};
          result.push_back(
              {[=] { kernel(params); },
               blocks,
               1,
               push ? blocks * m_width.threads : blocks,
               {{static_cast<const char*>(params.output), params.numel, dealt(blocks, push, period)}}});
        });
    return result;
  }
  const bool push = m_push && cuda::can_push(seat, key, m_what);
  const auto kernel = cuda::kernel_of(seat, key, m_what, push);
  cuda::each_launch(
      seat, key, m_what, push, m_poison, input, output, m_width,
      [&](const cuda::ExchangeParams& params, uint32_t blocks) {
        Launch launch{[=] { kernel(params); }, blocks, 1, push ? blocks * m_width.threads : blocks, {}};
        const bool rows = key.op == Op::kAllGather || key.op == Op::kAllToAll;
        for (uint32_t r = 0; r < (rows ? m_world_size : 1); ++r) {
          launch.parts.push_back({static_cast<const char*>(params.output) + r * params.columns * unit(),
                                  params.numel, dealt(blocks, push)});
        }
        result.push_back(std::move(launch));
      });
  return result;
}

/// Bit for bit, but for a norm: of that the last bit is free, for its squares are added up in another order.
bool Call::is_right(const char* data, const char* wanted, bool norm) const {
  if (!norm) return std::memcmp(data, wanted, unit()) == 0;
  float exact;
  std::memcpy(&exact, wanted, sizeof exact);
  const float bits = m_key.dtype == DType::kFloat32   ? 0x1p-20f
                     : m_key.dtype == DType::kFloat16 ? 0x1p-10f
                                                      : 0x1p-7f;
  return std::abs(value_of(data, m_key.dtype) - exact) <= bits * std::abs(exact) + 1e-7f;
}

std::string Call::check(uint32_t rank, const Launch& launch, Outcome outcome) const {
  struct Share {
    bool right = true;
    bool poison = true;
  };
  std::vector<Share> shares(launch.shares);
  for (const Part& part : launch.parts) {
    const size_t first = (part.data - m_outputs[rank].data()) / unit();
    const bool norm = m_columns != 0 && first >= m_key.numel;
    for (uint64_t i = 0; i < part.numel; ++i) {
      const char* data = part.data + i * unit();
      // Behind the sums the norms are, as fp32.
      const size_t at =
          norm ? m_key.numel * unit() + (first + i - m_key.numel) * sizeof(float) : (first + i) * unit();
      Share& share = shares[part.share(i * unit())];
      share.right = share.right && is_right(data, m_expected[rank].data() + at, norm);
      share.poison = share.poison &&
                     (norm ? std::isnan(value_of(data, m_key.dtype)) : is_poison(data, m_poison, unit()));
    }
  }
  for (size_t s = 0; s < shares.size(); ++s) {
    const Share& share = shares[s];
    const bool good = outcome == Outcome::kRight    ? share.right
                      : outcome == Outcome::kPoison ? share.poison
                                                    : share.right || share.poison;
    if (good) continue;
    return name() + ": the output of rank " + std::to_string(rank) + ", share " + std::to_string(s) + " of " +
           std::to_string(shares.size()) + ", is " +
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

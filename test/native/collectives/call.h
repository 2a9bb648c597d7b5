// A collective of all ranks with random data: its launches, and what has to be in its outputs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "group.h"
#include "random.h"

namespace collectives {

/// What the command line may ask for.
inline constexpr const char* kKinds[] = {"pull_one_shot",  "pull_two_shot", "push_one_shot",
                                         "all_gather",     "broadcast",     "all_to_all",
                                         "reduce_scatter", "reduce",        "rms_norm"};
inline constexpr uint32_t kAnyKind = std::size(kKinds);

struct Limits {
  uint32_t kind = kAnyKind;  // an index of kKinds
  uint32_t dtypes = 6;       // so many, of those that are reduced
  uint32_t blocks = 2;
  uint32_t threads = 4;
};

/// Memory that starts at any element, with a margin before it that nobody may write to.
class Tensor {
 public:
  Tensor(size_t bytes, size_t margin);
  char* data() const { return m_memory.get() + m_margin; }
  bool margin_is_untouched() const;

 private:
  size_t m_margin;
  Memory m_memory;
};

/// How a launch has to end: in a group that breaks a share of the output may be poison as a whole.
enum class Outcome { kRight, kRightOrPoison, kPoison };

class Call {
 public:
  Call(Random& random, const Limits& limits, uint32_t world_size);
  /// The same call with other data, maybe elsewhere and of another width.
  Call(Random& random, const Limits& limits, const Call& like);

  /// One launch of a rank, and the parts of its output that it writes. They are divided into shares: a
  /// block's, or where data is pushed a thread's; `share` tells which one a byte of the part is in.
  struct Part {
    const char* data;
    uint64_t numel;
    std::function<uint64_t(size_t byte)> share;
  };
  struct Launch {
    std::function<void()> kernel;
    uint32_t blocks;
    uint32_t row_blocks;
    uint64_t shares;
    std::vector<Part> parts;
  };

  /// `another`: this rank is told of another call.
  std::vector<Launch> launches(const cuda::Seat& seat, bool another) const;
  /// Empty, or what is wrong with what the launch wrote.
  std::string check(uint32_t rank, const Launch& launch, Outcome outcome) const;

  const cuda::Width& width() const { return m_width; }
  std::string name() const;

 private:
  void draw_data(Random& random, const Limits& limits);
  void fill(Random& random, char* data, size_t bytes) const;
  std::vector<char> expected(uint32_t rank) const;
  std::vector<char> reduced(size_t first, size_t size) const;
  std::vector<char> with_norm(std::vector<char> reduced, uint32_t rank) const;
  bool is_right(const char* data, const char* wanted, bool norm) const;
  Launch rms_norm(const cuda::RmsNormParams& params, uint32_t blocks) const;
  std::function<uint64_t(size_t byte)> dealt(uint32_t blocks, bool push,
                                             uint64_t period = ~uint64_t{0}) const;
  bool reduces() const { return m_key.op == Op::kAllReduce || m_what.reduces(); }
  size_t unit() const { return std::min<size_t>(m_what.item_bytes, 8); }

  uint32_t m_kind;
  uint32_t m_world_size;
  CallKey m_key;
  cpu::Exchange m_what{};
  uint64_t m_poison;
  bool m_push;  // what may be pushed
  cuda::Width m_width;
  uint64_t m_columns = 0;  // of rms_norm's rows
  uint32_t m_row_blocks = 1;
  float m_eps = 0;
  float m_weight_bias = 0;
  std::vector<Tensor> m_inputs;
  std::vector<Tensor> m_residuals;
  std::vector<Tensor> m_weights;
  std::vector<Tensor> m_outputs;
  std::vector<std::vector<char>> m_expected;
};

}  // namespace collectives

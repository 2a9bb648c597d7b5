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
inline constexpr const char* kKinds[] = {"pull_one_shot", "pull_two_shot", "push_one_shot",  "all_gather",
                                         "broadcast",     "all_to_all",    "reduce_scatter", "reduce"};
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

/// How a launch has to end: in a group that breaks a block's share of the output, or where data is pushed a
/// thread's, may be poison as a whole.
enum class Outcome { kRight, kRightOrPoison, kPoison };

class Call {
 public:
  Call(Random& random, const Limits& limits, uint32_t world_size);
  /// The same call with other data, maybe elsewhere and of another width.
  Call(Random& random, const Limits& limits, const Call& like);

  /// One launch of a rank, and the parts of its output that it writes.
  struct Part {
    const char* data;
    uint64_t numel;
  };
  struct Launch {
    std::function<void()> kernel;
    uint32_t blocks;
    std::vector<Part> parts;
    uint64_t period;  // packs after which the threads' shares begin anew
    bool pushed;
  };

  /// `another`: this rank is told of another call.
  std::vector<Launch> launches(const cuda::Seat& seat, bool another) const;
  /// Empty, or what is wrong with what the launch wrote.
  std::string check(uint32_t rank, const Launch& launch, Outcome outcome) const;

  const cuda::Width& width() const { return m_width; }
  std::string name() const;

 private:
  void draw_data(Random& random, const Limits& limits);
  void fill(Random& random, char* data) const;
  std::vector<char> expected(uint32_t rank) const;
  bool reduces() const { return m_key.op == Op::kAllReduce || m_what.reduces(); }
  size_t unit() const { return std::min<size_t>(m_what.item_bytes, 8); }

  uint32_t m_kind;
  uint32_t m_world_size;
  CallKey m_key;
  cpu::Exchange m_what{};
  uint64_t m_poison;
  bool m_push;  // what may be pushed
  cuda::Width m_width;
  std::vector<Tensor> m_inputs;
  std::vector<Tensor> m_outputs;
  std::vector<std::vector<char>> m_expected;
};

}  // namespace collectives

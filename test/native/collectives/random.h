// Chance that a seed repeats.
#pragma once

#include <cstdint>

namespace collectives {

class Random {
 public:
  explicit Random(uint64_t seed) : m_state(seed * 0x9E3779B97F4A7C15u + 1) {}

  /// SplitMix64 (Steele, Lea, Flood, 2014).
  uint64_t next() {
    uint64_t x = m_state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }
  uint64_t below(uint64_t n) { return next() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }

 private:
  uint64_t m_state;
};

}  // namespace collectives

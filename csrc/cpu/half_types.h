// fp16 and bf16 as storage: conversions to and from fp32 in integer arithmetic that compilers vectorise on
// any machine.
#pragma once

#include <bit>
#include <cstdint>

namespace gpusync::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

inline void from_float(float value, BFloat16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  const uint32_t nan = (bits >> 16) | 0x40;  // rounding could turn a NaN into infinity
  out.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

inline float to_float(Float16 x) {
  // Move the 15 value bits into place and re-base the exponent. Exponent 31 (infinity, NaN) is re-based
  // twice, to 255. Exponent 0 (zero, subnormal) is given the leading one it lacks, which a subtraction then
  // takes away exactly: no fp32 subnormal is touched, so a process that flushes those gets the same result.
  constexpr uint32_t kRebase = (127 - 15) << 23;
  constexpr uint32_t kSmallest = (127 - 14) << 23;
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t shifted = uint32_t{x.bits & 0x7fffu} << 13;
  const uint32_t exponent = x.bits & 0x7c00u;
  const uint32_t normal = shifted + kRebase + (exponent == 0x7c00u ? kRebase : 0);
  const float subnormal = std::bit_cast<float>(shifted + kSmallest) - std::bit_cast<float>(kSmallest);
  return std::bit_cast<float>(sign | (exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal));
}

inline void from_float(float value, Float16& out) {
  constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
  constexpr uint32_t kOverflow = 0x477ff000;  // 65520: from here on nearest-even gives infinity
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Adding 0.5 lets the adder round a subnormal result into the low bits of the sum.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  uint32_t result = magnitude < kSmallestNormal ? subnormal : normal;
  result = magnitude >= kOverflow ? 0x7c00 : result;
  result = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : result;
  out.bits = static_cast<uint16_t>(sign | result);
}

}  // namespace gpusync::cpu

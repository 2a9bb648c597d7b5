#include "reduce.h"

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "half_types.h"

// The loops are compiled for several levels of x86-64 and chosen when the library is loaded. (Sanitizers do
// not support the loader's choice.)
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(GPUSYNC_NO_CLONES)
#define GPUSYNC_CLONES __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define GPUSYNC_CLONES
#endif

namespace gpusync::cpu {
namespace {

// Loading and storing through the type that sums are kept in.
template <class T>
struct Element {
  using Accumulator = T;
  static T load(T x) { return x; }
  static void store(T value, T& out) { out = value; }
};

template <class T>
struct HalfElement {
  using Accumulator = float;
  static float load(T x) { return to_float(x); }
  static void store(float value, T& out) { from_float(value, out); }
};
template <>
struct Element<BFloat16> : HalfElement<BFloat16> {};
template <>
struct Element<Float16> : HalfElement<Float16> {};

/// What most reductions end with: nothing.
struct AsItIs {
  template <class A>
  static A finish(A sum, uint32_t) {
    return sum;
  }
};

struct Sum : AsItIs {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;  // wraps without undefined behaviour
      return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};

struct Avg : Sum {
  template <class A>
  static A finish(A sum, uint32_t n) {
    return sum * static_cast<A>(1.0 / n);
  }
};

// The comparisons are such that a NaN on either side wins.
struct Max : AsItIs {
  template <class A>
  static A apply(A a, A b) {
    return b > a || b != b ? b : a;
  }
};

struct Min : AsItIs {
  template <class A>
  static A apply(A a, A b) {
    return b < a || b != b ? b : a;
  }
};

// Blocks small enough that the accumulators and every source's part of a block stay in the first-level cache.
constexpr uint64_t kBlock = 1024;

#define GPUSYNC_REDUCE_BODY(T, F)                                                                \
  using E = Element<T>;                                                                          \
  using A = E::Accumulator;                                                                      \
  auto* out = static_cast<T*>(output);                                                           \
  const auto* const* in = reinterpret_cast<const T* const*>(sources);                            \
  if (n_sources == 2) {                                                                          \
    const T* a = in[0];                                                                          \
    const T* b = in[1];                                                                          \
    for (uint64_t i = 0; i < numel; ++i) {                                                       \
      E::store(F::finish(F::apply(E::load(a[i]), E::load(b[i])), 2), out[i]);                    \
    }                                                                                            \
    return;                                                                                      \
  }                                                                                              \
  A sum[kBlock];                                                                                 \
  for (uint64_t first = 0; first < numel; first += kBlock) {                                     \
    const uint64_t count = std::min(kBlock, numel - first);                                      \
    for (uint64_t i = 0; i < count; ++i) sum[i] = E::load(in[0][first + i]);                     \
    for (uint32_t s = 1; s < n_sources; ++s) {                                                   \
      const T* next = in[s] + first;                                                             \
      for (uint64_t i = 0; i < count; ++i) sum[i] = F::apply(sum[i], E::load(next[i]));          \
    }                                                                                            \
    for (uint64_t i = 0; i < count; ++i) E::store(F::finish(sum[i], n_sources), out[first + i]); \
  }

using ReduceFn = void (*)(void*, const void* const*, uint32_t, uint64_t);

// Clones are not made of templates, hence functions by name.
#define GPUSYNC_REDUCE(T, F)                                                                         \
  GPUSYNC_CLONES void reduce_##T##_##F(void* output, const void* const* sources, uint32_t n_sources, \
                                       uint64_t numel) {                                             \
    GPUSYNC_REDUCE_BODY(T, F)                                                                        \
  }
#define GPUSYNC_REDUCE_ALL(T) GPUSYNC_REDUCE(T, Sum) GPUSYNC_REDUCE(T, Max) GPUSYNC_REDUCE(T, Min)
#define GPUSYNC_REDUCE_FLOAT(T) GPUSYNC_REDUCE_ALL(T) GPUSYNC_REDUCE(T, Avg)
GPUSYNC_REDUCE_FLOAT(float)
GPUSYNC_REDUCE_FLOAT(double)
GPUSYNC_REDUCE_FLOAT(Float16)
GPUSYNC_REDUCE_FLOAT(BFloat16)
GPUSYNC_REDUCE_ALL(int32_t)
GPUSYNC_REDUCE_ALL(int64_t)

#define GPUSYNC_ROW(T, Avg) {reduce_##T##_Sum, reduce_##T##_Max, reduce_##T##_Min, Avg}
#define GPUSYNC_FLOAT_ROW(T) GPUSYNC_ROW(T, reduce_##T##_Avg)

ReduceFn choose(DType dtype, ReduceOp op) {
  static constexpr ReduceFn kTable[][4] = {GPUSYNC_FLOAT_ROW(float),      GPUSYNC_FLOAT_ROW(double),
                                           GPUSYNC_FLOAT_ROW(Float16),    GPUSYNC_FLOAT_ROW(BFloat16),
                                           GPUSYNC_ROW(int32_t, nullptr), GPUSYNC_ROW(int64_t, nullptr)};
  const auto row = static_cast<uint32_t>(dtype) - static_cast<uint32_t>(DType::kFloat32);
  const ReduceFn chosen = row < std::size(kTable) ? kTable[row][static_cast<uint32_t>(op)] : nullptr;
  if (chosen == nullptr) throw std::runtime_error("gpusync: cannot reduce this dtype in this way");
  return chosen;
}

}  // namespace

size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kNone:
    case DType::kOther: break;
  }
  throw std::runtime_error("gpusync: not a dtype that collectives take");
}

void reduce(void* output, const void* const* sources, uint32_t n_sources, uint64_t numel, DType dtype,
            ReduceOp op) {
  choose(dtype, op)(output, sources, n_sources, numel);
}

}  // namespace gpusync::cpu

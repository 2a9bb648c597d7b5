// The kernel of all_reduce_rms_norm, and what it is given.
#pragma once

#include <algorithm>
#include <cstdint>

#include "all_reduce.h"

namespace gpusync::cuda {

/// `output` of the base is residual + all_reduce(input).
struct RmsNormParams : AllReduceParams {
  const void* residual;
  const void* weight;
  void* norm;
  uint32_t row_parcels;  // 8 bytes each
  uint32_t row_blocks;   // a cluster of them has a row
  float one_by_columns;
  float eps;
  float weight_bias;
};

using RmsNormKernel = void (*)(RmsNormParams);

inline constexpr uint32_t kRmsNormThreads = 512;  // at most
inline constexpr uint32_t kRowThreads = 256;      // of a block, while there are blocks enough

/// How many blocks, in a cluster, share a row, and how many threads each of them has, in full warps.
struct RowShape {
  uint32_t blocks;
  uint32_t threads;
};

/// For `rows` of them in `most_blocks`, of which `most_of_row` may be one row's: small blocks, so that no
/// thread has much to do, while there are enough.
inline RowShape row_shape(uint64_t rows, uint64_t row_parcels, uint32_t most_blocks, uint32_t most_of_row) {
  uint32_t blocks = 1;
  while (blocks * kRowThreads < row_parcels && 2 * blocks <= most_of_row && rows * 2 * blocks <= most_blocks)
    blocks *= 2;
  const uint64_t threads = (row_parcels + blocks - 1) / blocks;
  return {blocks, std::min(static_cast<uint32_t>((threads + 31) / 32 * 32), kRmsNormThreads)};
}

/// The kernel for float32, float16 and bfloat16.
RmsNormKernel push_rms_norm(DType dtype, uint32_t world_size);

}  // namespace gpusync::cuda

// The kernels of the exchanges, and what they are given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "all_reduce.h"

namespace gpusync::cuda {

/// `numel` of the base are the columns of this part, `groups` the packs of a staged row.
struct ExchangeParams : AllReduceParams {
  uint64_t columns;  // of a whole row, in the input and in the output
  uint64_t poison;
  uint32_t rows;    // of my input
  uint32_t my_row;  // the row of a peer's input that is meant for me
  uint32_t giver;   // the rank whose input all read; kMaxRanks: everybody's
  uint32_t taker;   // the rank that reduces, for others get zeros; kMaxRanks: everybody
};

using ExchangeKernel = void (*)(ExchangeParams);

inline constexpr uint32_t kExchangeThreads = 512;
inline constexpr uint32_t kPushedExchangeThreads = 256;

/// The kernel that copies elements of `item` bytes, 1, 2, 4 or 8.
ExchangeKernel copying(size_t item);
/// The kernel that reduces.
ExchangeKernel reducing(DType dtype, ReduceOp op, uint32_t world_size);
/// Those for whole rows that are pushed instead: all_gather and all_to_all, reduce_scatter.
ExchangeKernel push_copying(size_t item, uint32_t world_size);
ExchangeKernel push_reducing(DType dtype, ReduceOp op, uint32_t world_size);

}  // namespace gpusync::cuda

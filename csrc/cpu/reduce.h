// Element-wise reduction of every rank's data, in rank order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpusync/fingerprint.h"

namespace gpusync::cpu {

size_t item_bytes(DType dtype);

/// output[i] = sources[0][i] op sources[1][i] op ..., always in this order, so that every rank gets the same
/// bits. The 16-bit floating-point types are reduced in fp32 and rounded once, to nearest even. Integers wrap
/// around. A NaN in any source gives NaN, also for max and min.
void reduce(void* output, const void* const* sources, uint32_t n_sources, uint64_t numel, DType dtype,
            ReduceOp op);

}  // namespace gpusync::cpu

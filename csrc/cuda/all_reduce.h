// The all-reduce kernels, one file for each algorithm, and what they are given.
#pragma once

#include <cstdint>

#include "gpusync/device_wait.h"
#include "gpusync/fingerprint.h"
#include "gpusync/pull_controller.h"

namespace gpusync::cuda {

struct AllReduceParams {
  PullController pull;
  WaitContext wait;
  char* area[kMaxRanks];  // of every rank, the algorithm's own: two halves, one after the other
  uint64_t half_bytes;
  uint64_t slot_bytes;  // push: what one source has in a half
  uint64_t groups;  // two-shot: packs in one rank's share (a 64-bit division in the kernel would cost a stack
                    // frame)
  uint32_t* calls;  // my finished collectives: a copy for each block
  const void* input;
  void* output;
  uint64_t numel;
  int32_t* token;
  uint32_t key;
  DType dtype;
  ReduceOp reduce_op;
  double scale;  // avg: what the sum is multiplied by
};

/// For __launch_bounds__: at 64 registers two blocks of 512 threads fit on a multiprocessor together. So
/// collectives of two groups, which blocks of different ranks may have begun in different orders, do not wait
/// for one another's place. (The blocks of a cluster, row_sum.cuh, need theirs in one part of the GPU, which
/// this does not count: beside many blocks of another group they may wait until that has ended or given up.)
inline constexpr int kResidentBlocks = 2;

using AllReduceKernel = void (*)(AllReduceParams);

/// The kernel for a dtype, op and number of ranks; all three give the same bits.
AllReduceKernel pull_one_shot(DType dtype, ReduceOp op, uint32_t world_size);
AllReduceKernel pull_two_shot(DType dtype, ReduceOp op, uint32_t world_size);
AllReduceKernel push_one_shot(DType dtype, ReduceOp op, uint32_t world_size);

inline AllReduceKernel kernel_of(Algo algo, DType dtype, ReduceOp op, uint32_t world_size) {
  switch (algo) {
    case Algo::kPullTwoShot: return pull_two_shot(dtype, op, world_size);
    case Algo::kPushOneShot: return push_one_shot(dtype, op, world_size);
    case Algo::kNone:
    case Algo::kPushRmsNorm:  // has kernels of its own (push_rms_norm.h)
    case Algo::kPullOneShot: break;
  }
  return pull_one_shot(dtype, op, world_size);
}

}  // namespace gpusync::cuda

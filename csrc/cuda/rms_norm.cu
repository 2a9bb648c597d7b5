// all_reduce_rms_norm where it is one kernel. (What is larger goes step by step, in Python: rms_norm.py.)
#include "group.h"
#include "kernels.h"
#include "launches.h"
#include "row_sum.cuh"

namespace gpusync::cuda {

void preload_rms_norm() {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const uint32_t world_size : {1, 2, 4, 8}) load_kernel(push_rms_norm(dtype, world_size));
  }
}

void Group::rms_norm(const Launch& launch, const RmsNorm& what, const void* input, void* output,
                     const cpu::Payload& payload) {
  const CallKey key = m_host.collective_key(Op::kAllReduce, payload, ReduceOp::kSum, Algo::kPushRmsNorm);
  cpu::CallRecord call = cpu::record(key, payload);
  m_host.begin(call);

  const Seat seat = this->seat(launch);
  const RmsNormKernel kernel = push_rms_norm(payload.dtype, m_host.world_size());
  const uint32_t most_blocks = std::min(m_config.max_blocks, kMaxBlocks);
  const RowShape shape =
      row_shape(payload.numel / what.columns, what.columns * cpu::item_bytes(payload.dtype) / 8, most_blocks,
                m_config.clusters ? std::min(most_blocks, kMaxRowBlocks) : 1);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {shape.blocks, 1, 1};
  Turn turn(*this, seat.wait.channel, Kind::kSync, launch.stream);
  each_launch(seat, key, what, shape.blocks, input, output, {most_blocks, shape.threads},
              [&](const RmsNormParams& params, uint32_t blocks) {
                cudaLaunchConfig_t config{};
                config.gridDim = {blocks, 1, 1};
                config.blockDim = {shape.threads, 1, 1};
                config.stream = launch.stream;
                config.attrs = &cluster;
                config.numAttrs = shape.blocks > 1 ? 1 : 0;
                check(cudaLaunchKernelEx(&config, kernel, params), "launching a kernel");
              });
  turn.end();
}

}  // namespace gpusync::cuda

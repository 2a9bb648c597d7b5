// The collectives in which every rank reads a piece of every rank's input: all_gather, broadcast, all_to_all,
// reduce_scatter, and reduce. Pulled, or where little is sent pushed.
#include "exchange.h"

#include "group.h"
#include "kernels.h"
#include "launches.h"

namespace gpusync::cuda {

void preload_exchanges() {
  for (const size_t item : {1, 2, 4, 8}) {
    load_kernel(copying(item));
    for (const uint32_t world_size : {2, 4, 8}) load_kernel(push_copying(item, world_size));
  }
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32, DType::kInt64}) {
    for (const uint32_t world_size : {1, 2, 4, 8}) {
      load_kernel(reducing(dtype, ReduceOp::kSum, world_size));
      load_kernel(push_reducing(dtype, ReduceOp::kSum, world_size));
    }
  }
}

void Group::exchange(const Launch& launch, const cpu::Exchange& what, const void* input, void* output,
                     const cpu::Payload& payload, uint64_t poison) {
  const CallKey key = m_host.exchange_key(what, payload);
  if (payload.numel == 0) {
    m_host.skip(key, payload);
    return;
  }
  cpu::CallRecord call = cpu::record(key, payload);
  if (what.has_root()) call.peer = static_cast<int16_t>(key.root);
  m_host.begin(call);

  const Seat seat = this->seat(launch);
  const bool push = is_pushed(seat, key, what);
  const ExchangeKernel kernel = kernel_of(seat, key, what, push);
  const Width width{std::min(m_config.max_blocks, kMaxBlocks),
                    push ? kPushedExchangeThreads : kExchangeThreads};
  Turn turn(*this, seat.wait.channel, Kind::kSync, launch.stream);
  each_launch(seat, key, what, push, poison, input, output, width,
              [&](const ExchangeParams& params, uint32_t blocks) {
                kernel<<<blocks, width.threads, 0, launch.stream>>>(params);
              });
  turn.end();
}

}  // namespace gpusync::cuda

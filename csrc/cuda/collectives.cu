// All-reduce: which algorithm, and how wide.
#include <algorithm>

#include "all_reduce.h"
#include "group.h"
#include "kernels.h"
#include "launches.h"

namespace gpusync::cuda {
namespace {

// Where nothing was measured. Push is at its best while the launch is the larger part of the time; two-shot
// where the bytes are.
constexpr Group::TuningRow kDefaults[] = {
    {32 << 10, Algo::kPushOneShot, kMaxBlocks, 256},
    {256 << 10, Algo::kPullOneShot, kMaxBlocks, 512},
    {UINT64_MAX, Algo::kPullTwoShot, kMaxBlocks, 512},
};

}  // namespace

void preload_collectives() {
  for (const Algo algo : {Algo::kPullOneShot, Algo::kPullTwoShot, Algo::kPushOneShot}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16,
                              DType::kInt32, DType::kInt64}) {
      for (const uint32_t world_size : {1, 2, 4, 8})
        load_kernel(kernel_of(algo, dtype, ReduceOp::kSum, world_size));
    }
  }
}

void Group::set_tuning(std::vector<TuningRow> rows) {
  const std::unique_lock lock(m_tuning_mutex);
  m_tuning = std::move(rows);
}

template <class Row>
void Group::each_row(DType dtype, Row&& row) const {
  const std::shared_lock lock(m_tuning_mutex);
  const TuningRow* first = m_tuning.empty() ? std::begin(kDefaults) : m_tuning.data();
  const TuningRow* last = m_tuning.empty() ? std::end(kDefaults) : m_tuning.data() + m_tuning.size();
  const uint32_t bit = 1u << static_cast<uint32_t>(dtype);
  const bool named = std::any_of(first, last, [bit](const TuningRow& r) { return (r.dtypes & bit) != 0; });
  for (const TuningRow* r = first; r != last; ++r) {
    if ((named ? (r->dtypes & bit) != 0 : r->dtypes == 0) && !row(*r)) return;
  }
}

Group::TuningRow Group::choose(Algo algo, DType dtype, uint64_t bytes) const {
  // An algorithm asked for by name takes its widths from the row that would have chosen it, or from the
  // nearest one.
  TuningRow chosen{0, algo, kMaxBlocks, 512};
  each_row(dtype, [&](const TuningRow& row) {
    if (algo != Algo::kNone && row.algo != algo) return true;
    chosen = row;
    return bytes > row.max_bytes;
  });
  chosen.blocks = std::min(chosen.blocks, m_config.max_blocks);
  return chosen;
}

uint64_t Group::pushed_bytes(DType dtype) const {
  uint64_t bytes = 0;
  each_row(dtype, [&](const TuningRow& row) {
    if (row.algo != Algo::kPushOneShot) return false;
    bytes = row.max_bytes;
    return true;
  });
  return std::min<uint64_t>(bytes, m_layout.half_bytes() / m_host.world_size() / 16 * 8);
}

void Group::all_reduce(const Launch& launch, const void* input, void* output, const cpu::Payload& payload,
                       ReduceOp reduce_op, Algo algo) {
  const TuningRow row = choose(algo, payload.dtype, payload.numel * cpu::item_bytes(payload.dtype));
  const CallKey key = m_host.collective_key(Op::kAllReduce, payload, reduce_op, row.algo);
  if (payload.numel == 0) {
    m_host.skip(key, payload);
    return;
  }
  cpu::CallRecord call = cpu::record(key, payload);
  m_host.begin(call);

  const Seat seat = this->seat(launch);
  const AllReduceKernel kernel = kernel_of(row.algo, payload.dtype, reduce_op, m_host.world_size());
  Turn turn(*this, seat.wait.channel, Kind::kSync, launch.stream);
  each_launch(seat, key, input, output, {row.blocks, row.threads},
              [&](const AllReduceParams& params, uint32_t blocks) {
                kernel<<<blocks, row.threads, 0, launch.stream>>>(params);
              });
  turn.end();
}

}  // namespace gpusync::cuda

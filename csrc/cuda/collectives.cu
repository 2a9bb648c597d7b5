// All-reduce: which algorithm, how wide, in how many parts.
#include <algorithm>

#include "all_reduce.h"
#include "cpu/reduce.h"
#include "group.h"
#include "kernels.h"

namespace gpusync::cuda {
namespace {

AllReduceKernel kernel_of(Algo algo, DType dtype, ReduceOp op, uint32_t world_size) {
  switch (algo) {
    case Algo::kPullTwoShot: return pull_two_shot(dtype, op, world_size);
    case Algo::kPushOneShot: return push_one_shot(dtype, op, world_size);
    case Algo::kNone:
    case Algo::kPullOneShot: break;
  }
  return pull_one_shot(dtype, op, world_size);
}

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

Group::TuningRow Group::choose(Algo algo, DType dtype, uint64_t bytes) const {
  const std::shared_lock lock(m_tuning_mutex);
  const TuningRow* first = m_tuning.empty() ? std::begin(kDefaults) : m_tuning.data();
  const TuningRow* last = m_tuning.empty() ? std::end(kDefaults) : m_tuning.data() + m_tuning.size();
  const uint32_t bit = 1u << static_cast<uint32_t>(dtype);
  const bool named = std::any_of(first, last, [bit](const TuningRow& r) { return (r.dtypes & bit) != 0; });
  // An algorithm asked for by name takes its widths from the row that would have chosen it, or from the
  // nearest one.
  const TuningRow* row = nullptr;
  for (const TuningRow* r = first; r != last; ++r) {
    if (named ? (r->dtypes & bit) == 0 : r->dtypes != 0) continue;
    if (algo != Algo::kNone && r->algo != algo) continue;
    row = r;
    if (bytes <= r->max_bytes) break;
  }
  TuningRow chosen = row != nullptr ? *row : TuningRow{0, algo, kMaxBlocks, 512};
  chosen.blocks = std::min(chosen.blocks, m_config.max_blocks);
  return chosen;
}

void Group::all_reduce(const Launch& launch, const void* input, void* output, const cpu::Payload& payload,
                       ReduceOp reduce_op, Algo algo) {
  const uint32_t channel = m_host.config().channels;
  const uint32_t world_size = m_host.world_size();
  const size_t item = cpu::item_bytes(payload.dtype);
  const TuningRow row = choose(algo, payload.dtype, payload.numel * item);
  const CallKey key = m_host.collective_key(Op::kAllReduce, payload, reduce_op, row.algo);
  if (payload.numel == 0) {
    m_host.skip(key, payload);
    return;
  }
  cpu::CallRecord call = cpu::record(key, payload);
  m_host.begin(call);

  const bool push = row.algo == Algo::kPushOneShot;
  const uint64_t slot = m_layout.half_bytes() / world_size / 16 * 16;
  AllReduceParams params{m_pull[channel],
                         context(channel),
                         {},
                         m_layout.half_bytes(),
                         slot,
                         0,
                         in_pad<uint32_t>(m_host.rank(), m_layout.push_calls(channel)),
                         input,
                         output,
                         payload.numel,
                         launch.token,
                         fingerprint(key),
                         payload.dtype,
                         reduce_op,
                         1.0 / world_size};
  for (uint32_t r = 0; r < world_size; ++r) {
    params.area[r] = in_pad<char>(r, push ? m_layout.push_area() : m_layout.staging(0));
  }
  const AllReduceKernel kernel = kernel_of(row.algo, payload.dtype, reduce_op, world_size);
  // What one thread takes at a time, and how much fits: a pushed parcel of 16 bytes carries 8.
  const uint64_t unit = push ? 8 : row.algo == Algo::kPullTwoShot ? 16 * world_size : 16;
  const uint64_t chunk = (push ? slot / 2 : m_layout.half_bytes()) / item;
  Turn turn(*this, channel, Kind::kSync, launch.stream);
  for (uint64_t first = 0; first < payload.numel; first += chunk) {
    params.input = static_cast<const char*>(input) + first * item;
    params.output = static_cast<char*>(output) + first * item;
    params.numel = std::min(chunk, payload.numel - first);
    const uint64_t units = (params.numel * item + unit - 1) / unit;
    params.groups = units;
    const uint64_t blocks = (units + row.threads - 1) / row.threads;
    kernel<<<static_cast<uint32_t>(std::clamp<uint64_t>(blocks, 1, row.blocks)), row.threads, 0,
             launch.stream>>>(params);
  }
  turn.end();
}

}  // namespace gpusync::cuda

// All-reduce, pull one-shot: stage my input, meet, read everybody's, in one kernel.
#include <algorithm>
#include <type_traits>

#include "cpu/reduce.h"
#include "element.cuh"
#include "group.h"
#include "kernels.h"

namespace gpusync::cuda {
namespace {

struct AllReduceParams {
  PullController pull;
  WaitContext wait;
  char* staging[kMaxRanks];  // first half of every rank
  uint64_t half_bytes;
  uint32_t* calls;  // my finished collectives and, beside it, the finished blocks of the one under way
  const void* input;
  void* output;
  uint64_t numel;
  int32_t* token;
  uint32_t key;
  DType dtype;
};

constexpr uint32_t kThreads = 512;

/// Ends a call of several blocks: the last of them counts it. All blocks of the next call then agree on their half,
/// however many either call has.
__device__ __forceinline__ void finish_call(uint32_t* calls) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint32_t finished = atomicAdd(&calls[1], 1);
  if (finished + 1 == gridDim.x) {
    calls[1] = 0;
    calls[0] += 1;
  }
}

template <class T>
__device__ __forceinline__ Pack<T> poison(DType dtype) {
  Pack<T> pack;
  for (uint32_t i = 0; i < sizeof pack / 8; ++i) reinterpret_cast<uint64_t*>(&pack)[i] = poison_of(dtype);
  return pack;
}

/// Two staging halves in turn make a barrier at the end needless: half k % 2 is written again in call k + 2, after the
/// kernel of call k + 1, whose blocks have met blocks of every peer that started after the peer's kernel k had ended.
template <class T, class F, uint32_t kRanks>
__global__ void __launch_bounds__(kThreads) pull_one_shot_kernel(const __grid_constant__ AllReduceParams p) {
  using E = Element<T>;
  touch(p.token);
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const uint64_t packs = (p.numel + Pack<T>::kItems - 1) / Pack<T>::kItems;
  const uint64_t first = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  const uint64_t half = (p.calls[0] % kHalves) * p.half_bytes;

  auto* mine = reinterpret_cast<Pack<T>*>(p.staging[p.pull.rank()] + half);
  const bool input_aligned = is_aligned(input);
  for (uint64_t i = first; i < packs; i += stride) mine[i] = load_pack(input, i, p.numel, input_aligned);

  if (!p.pull.sync<true, true>(p.key, DeviceWait(p.wait))) {
    for (uint64_t i = first; i < packs; i += stride) store_pack(output, i, p.numel, false, poison<T>(p.dtype));
    return;
  }
  const uint32_t ranks = kRanks != 0 ? kRanks : p.pull.world_size();
  const bool output_aligned = is_aligned(output);
  for (uint64_t i = first; i < packs; i += stride) {
    const auto part = [&](uint32_t r) { return reinterpret_cast<const Pack<T>*>(p.staging[r] + half)[i]; };
    typename E::Accumulator sum[Pack<T>::kItems];
    const auto add = [&](const Pack<T>& pack, bool is_first) {
#pragma unroll
      for (uint32_t k = 0; k < Pack<T>::kItems; ++k) {
        const auto value = E::load(pack.items[k]);
        sum[k] = is_first ? value : F::apply(sum[k], value);
      }
    };
    if constexpr (kRanks != 0) {
      Pack<T> parts[kRanks];  // all loads in flight before the first is used
#pragma unroll
      for (uint32_t r = 0; r < kRanks; ++r) parts[r] = part(r);
#pragma unroll
      for (uint32_t r = 0; r < kRanks; ++r) add(parts[r], r == 0);
    } else {
      add(part(0), true);
      for (uint32_t r = 1; r < ranks; ++r) add(part(r), false);
    }
    Pack<T> result;
#pragma unroll
    for (uint32_t k = 0; k < Pack<T>::kItems; ++k) result.items[k] = E::store(sum[k]);
    store_pack(output, i, p.numel, output_aligned, result);
  }
  finish_call(p.calls);
}

using Kernel = void (*)(AllReduceParams);

template <class T, class F>
Kernel for_ranks(uint32_t world_size) {
  switch (world_size) {
    case 2: return pull_one_shot_kernel<T, F, 2>;
    case 4: return pull_one_shot_kernel<T, F, 4>;
    case 8: return pull_one_shot_kernel<T, F, 8>;
    default: return pull_one_shot_kernel<T, F, 0>;
  }
}

// Unrolled over the ranks only for what models reduce all the time: sums of the floating-point types up to 32 bits.
template <class T>
Kernel for_op(ReduceOp op, uint32_t world_size) {
  switch (op) {
    case ReduceOp::kMax: return pull_one_shot_kernel<T, Max, 0>;
    case ReduceOp::kMin: return pull_one_shot_kernel<T, Min, 0>;
    case ReduceOp::kSum: break;
  }
  if constexpr (std::is_integral_v<T> || sizeof(T) == 8) return pull_one_shot_kernel<T, Sum, 0>;
  return for_ranks<T, Sum>(world_size);
}

Kernel choose(DType dtype, ReduceOp op, uint32_t world_size) {
  switch (dtype) {
    case DType::kFloat32: return for_op<float>(op, world_size);
    case DType::kFloat64: return for_op<double>(op, world_size);
    case DType::kFloat16: return for_op<__half>(op, world_size);
    case DType::kBFloat16: return for_op<__nv_bfloat16>(op, world_size);
    case DType::kInt32: return for_op<int32_t>(op, world_size);
    case DType::kInt64: return for_op<int64_t>(op, world_size);
    case DType::kNone:
    case DType::kOther: break;
  }
  throw std::runtime_error("gpusync: cannot reduce this dtype");
}

}  // namespace

void preload_collectives() {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32,
                            DType::kInt64}) {
    for (const uint32_t world_size : {1, 2, 4, 8}) load_kernel(choose(dtype, ReduceOp::kSum, world_size));
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) load_kernel(choose(dtype, op, 1));
  }
}

void Group::all_reduce(const Launch& launch, const void* input, void* output, const cpu::Payload& payload,
                       ReduceOp reduce_op, Algo algo) {
  const uint32_t channel = m_host.config().channels;
  const CallKey key = m_host.collective_key(payload, reduce_op, algo);
  if (payload.numel == 0) {
    m_host.skip(key, payload);
    return;
  }
  cpu::CallRecord call = cpu::record(key, payload);
  m_host.begin(call);
  AllReduceParams params{m_pull[channel], context(channel), {}, m_layout.half_bytes(),
                         in_pad<uint32_t>(m_host.rank(), m_layout.push_calls(channel)),
                         input, output, payload.numel, launch.token, fingerprint(key), payload.dtype};
  for (uint32_t r = 0; r < m_host.world_size(); ++r) params.staging[r] = in_pad<char>(r, m_layout.staging(0));
  const Kernel kernel = choose(payload.dtype, reduce_op, m_host.world_size());
  const size_t item = cpu::item_bytes(payload.dtype);
  const uint64_t chunk = m_layout.half_bytes() / item;
  Turn turn(*this, channel, Kind::kSync, launch.stream);
  for (uint64_t first = 0; first < payload.numel; first += chunk) {
    params.input = static_cast<const char*>(input) + first * item;
    params.output = static_cast<char*>(output) + first * item;
    params.numel = std::min(chunk, payload.numel - first);
    const uint64_t packs = (params.numel * item + 15) / 16;
    const auto blocks = static_cast<uint32_t>(std::clamp<uint64_t>((packs + kThreads - 1) / kThreads, 1, m_config.max_blocks));
    kernel<<<blocks, kThreads, 0, launch.stream>>>(params);
  }
  turn.end();
}

}  // namespace gpusync::cuda

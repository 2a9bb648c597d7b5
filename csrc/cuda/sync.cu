// Barriers, stages, signals and the push double buffer: one controller call in one small kernel each.
#include "check.h"
#include "group.h"
#include "kernels.h"

namespace gpusync::cuda {
namespace {

struct SyncParams {
  PullController pull;
  WaitContext wait;
  int32_t* token;
  uint32_t key;
};

// A lane for each peer: one warp up to 32 ranks.
uint32_t lanes(uint32_t world_size) { return world_size <= 32 ? 32 : kMaxRanks; }

template <bool kFence, bool kStart>
__global__ void __launch_bounds__(kMaxRanks) sync_kernel(const __grid_constant__ SyncParams p) {
  p.pull.sync<kFence, kStart, block::Alone>(p.key, DeviceWait(p.wait));
  touch(p.token);
}

struct SignalParams {
  SignalController signals;
  WaitContext wait;
  int32_t* token;
  uint32_t peer;
  uint32_t key;
};

__global__ void __launch_bounds__(32) signal_kernel(const __grid_constant__ SignalParams p) {
  touch(p.token);
  p.signals.signal(p.peer, p.key, DeviceWait(p.wait));
}

__global__ void __launch_bounds__(32) wait_signal_kernel(const __grid_constant__ SignalParams p) {
  touch(p.token);
  p.signals.wait(p.peer, p.key, DeviceWait(p.wait, uint64_t{1} << p.peer));
}

__global__ void push_epoch_kernel(PushController push, int32_t* token, int32_t* result) {
  touch(token);
  *result = static_cast<int32_t>(push.epoch());
}

__global__ void push_exit_kernel(PushController push, int32_t* token) {
  touch(token);
  push.exit_all(kMaxBlocks);  // kernels of the user's own may count by any of them
}

uint32_t key(Op op, bool fence = false) { return fingerprint({.op = op, .fence = fence}); }

__global__ void probe_write(uint64_t* word, uint64_t value) { publish<true>(word, value); }
__global__ void probe_read(const uint64_t* word, uint64_t* result) { *result = acquire(word); }

uint64_t pattern(uint32_t from, uint32_t to) { return 0x6770'7573'796e'0000u | from << 8 | to; }

}  // namespace

/// Kernels are loaded lazily; the first launch must not be the moment, for it may be in a capture, or beside
/// a kernel of another rank that waits for this one.
void Group::preload() const {
  load_kernel(sync_kernel<true, true>);
  load_kernel(sync_kernel<false, true>);
  load_kernel(sync_kernel<true, false>);
  load_kernel(sync_kernel<false, false>);
  load_kernel(signal_kernel);
  load_kernel(wait_signal_kernel);
  load_kernel(push_epoch_kernel);
  load_kernel(push_exit_kernel);
  preload_buffers();
  preload_collectives();
  preload_exchanges();
  preload_rms_norm();
  preload_latency();
}

template <bool kFence, bool kStart>
void Group::sync(const Launch& launch, Op op, int64_t channel) {
  const uint32_t c = m_host.checked_channel(channel);
  cpu::CallRecord call = cpu::record(op, c, kFence);
  m_host.begin(call);
  const SyncParams params{m_pull[c], context(c), launch.token, key(op, kFence)};
  Turn turn(*this, c, Kind::kSync, launch.stream);
  sync_kernel<kFence, kStart><<<1, lanes(m_host.world_size()), 0, launch.stream>>>(params);
  turn.end();
}

void Group::barrier(const Launch& launch, int64_t channel, bool fence) {
  fence ? sync<true, true>(launch, Op::kBarrier, channel) : sync<false, true>(launch, Op::kBarrier, channel);
}

void Group::pull_start(const Launch& launch, int64_t channel) {
  sync<false, true>(launch, Op::kPullStart, channel);
}

void Group::pull_end(const Launch& launch, int64_t channel, bool fence) {
  fence ? sync<true, false>(launch, Op::kPullEnd, channel)
        : sync<false, false>(launch, Op::kPullEnd, channel);
}

void Group::signal(const Launch& launch, int64_t destination, int64_t channel) {
  const uint32_t c = m_host.checked_channel(channel);
  const uint32_t dst = m_host.checked_rank(destination);
  cpu::CallRecord call = cpu::record(Op::kSignal, c, false, dst);
  m_host.begin(call);
  const SignalParams params{m_signal[c], context(c), launch.token, dst, key(Op::kSignal)};
  Turn turn(*this, c, Kind::kSignal, launch.stream);
  signal_kernel<<<1, 32, 0, launch.stream>>>(params);
  turn.end();
}

void Group::wait_signal(const Launch& launch, int64_t source, int64_t channel) {
  const uint32_t c = m_host.checked_channel(channel);
  const uint32_t src = m_host.checked_rank(source);
  cpu::CallRecord call = cpu::record(Op::kWaitSignal, c, false, src);
  m_host.begin(call);
  const SignalParams params{m_signal[c], context(c), launch.token, src, key(Op::kSignal)};
  Turn turn(*this, c, Kind::kWait, launch.stream);
  wait_signal_kernel<<<1, 32, 0, launch.stream>>>(params);
  turn.end();
}

void Group::push_epoch(const Launch& launch, int64_t channel, int32_t* result) {
  const uint32_t c = m_host.checked_channel(channel);
  cpu::CallRecord call = cpu::record(Op::kPushEpoch, c);
  m_host.begin(call);
  const PushController push(in_pad<uint32_t>(m_host.rank(), m_layout.push_calls(c)));
  Turn turn(*this, c, Kind::kSync, launch.stream);
  push_epoch_kernel<<<1, 1, 0, launch.stream>>>(push, launch.token, result);
  turn.end();
}

void Group::push_exit(const Launch& launch, int64_t channel) {
  const uint32_t c = m_host.checked_channel(channel);
  cpu::CallRecord call = cpu::record(Op::kPushExit, c);
  m_host.begin(call);
  const PushController push(in_pad<uint32_t>(m_host.rank(), m_layout.push_calls(c)));
  Turn turn(*this, c, Kind::kSync, launch.stream);
  push_exit_kernel<<<1, kMaxBlocks, 0, launch.stream>>>(push, launch.token);
  turn.end();
}

std::vector<int64_t> Group::probe(int phase) {
  const DeviceGuard guard(m_config.device);
  std::vector<int64_t> bad;
  uint64_t* result = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&result), sizeof *result), "cudaMalloc");
  const std::unique_ptr<uint64_t, void (*)(uint64_t*)> owner(result, [](uint64_t* p) { (void)cudaFree(p); });
  const uint32_t me = m_host.rank();
  for (uint32_t r = 0; r < m_host.world_size(); ++r) {
    uint64_t seen = 0;
    uint64_t expected = 0;
    cudaError_t status = cudaSuccess;
    if (phase == 0) {
      probe_write<<<1, 1, 0, cudaStreamPerThread>>>(in_pad<uint64_t>(r, m_layout.probe(me)), pattern(me, r));
      status = cudaStreamSynchronize(cudaStreamPerThread);
    } else {
      // Phase 1: did r's pattern reach my pad? Phase 2: do I read from r's pad what I wrote there?
      const uint32_t owner_rank = phase == 1 ? me : r;
      const uint32_t writer = phase == 1 ? r : me;
      expected = pattern(writer, owner_rank);
      probe_read<<<1, 1, 0, cudaStreamPerThread>>>(in_pad<uint64_t>(owner_rank, m_layout.probe(writer)),
                                                   result);
      status = cudaMemcpyAsync(&seen, result, sizeof seen, cudaMemcpyDeviceToHost, cudaStreamPerThread);
      if (status == cudaSuccess) status = cudaStreamSynchronize(cudaStreamPerThread);
    }
    if (status != cudaSuccess || seen != expected) bad.push_back(r);
  }
  return bad;
}

}  // namespace gpusync::cuda

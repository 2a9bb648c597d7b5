// The device side of a group whose ranks are GPUs (or share one). No torch here. The host side, with who is
// who, call records and failures, is the same as on the CPU: a cpu::Group over memory that the ranks' hosts
// share.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpu/group.h"
#include "gpusync/device_handle.h"
#include "kept_memory.h"
#include "pad.h"

namespace gpusync::cuda {

struct RmsNorm;
struct Seat;

struct DeviceConfig {
  int device;
  std::vector<int64_t> pads;  // every rank's pad, as mapped into this process
  size_t staging_bytes;
  uint32_t max_blocks;  // so that all blocks of all ranks on one GPU are resident together
  bool clusters;        // can all ranks' devices launch clusters of blocks?
};

/// Every rank's part of a symmetric buffer.
struct DeviceBuffer {
  std::vector<int64_t> parts;
  uint64_t poison;  // what a get from a broken group returns: 8 bytes, repeated
  std::shared_ptr<void> keep_alive;
};

/// One launch: where it goes and what it tells the device.
struct Launch {
  cudaStream_t stream;
  int32_t* token;
};

/// What a kernel reads an offset from: a number, or a device tensor that may change between replays of a
/// graph.
struct Offset {
  int64_t value;
  const int64_t* device;
};

class Group {
 public:
  /// `memory`: my own pad and the token, all that kernels touch when the group is closed.
  Group(cpu::Group& host, DeviceConfig config, KeptMemory::Parts memory);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int device() const { return m_config.device; }

  static constexpr auto kNoCapture = ~0ull;
  /// The capture that `stream` is in, or kNoCapture. With the first op of the group in a capture its graph
  /// becomes an owner of the memory that its kernels will touch whenever it is replayed.
  unsigned long long capture_of(cudaStream_t stream);

  // --- sync.cu
  void barrier(const Launch& launch, int64_t channel, bool fence);
  void pull_start(const Launch& launch, int64_t channel);
  void pull_end(const Launch& launch, int64_t channel, bool fence);
  void signal(const Launch& launch, int64_t destination, int64_t channel);
  void wait_signal(const Launch& launch, int64_t source, int64_t channel);
  void push_epoch(const Launch& launch, int64_t channel, int32_t* result);
  void push_exit(const Launch& launch, int64_t channel);

  // --- buffers.cu
  void add_buffer(const std::string& name, DeviceBuffer buffer);
  void put(const Launch& launch, const cpu::Buffer& buffer, int64_t rank, Offset offset, const void* source,
           const cpu::Payload& payload);
  void get(const Launch& launch, const cpu::Buffer& buffer, int64_t rank, Offset offset, void* target,
           const cpu::Payload& payload);

  // --- collectives.cu
  void all_reduce(const Launch& launch, const void* input, void* output, const cpu::Payload& payload,
                  ReduceOp reduce_op, Algo algo);  // Algo::kNone: auto
  /// The largest all_reduce that auto pushes, in one launch, in bytes; 0: none.
  uint64_t pushed_bytes(DType dtype) const;

  // --- rms_norm.cu; for payloads of at most pushed_bytes()
  void rms_norm(const Launch& launch, const RmsNorm& what, const void* input, void* output,
                const cpu::Payload& payload);

  // --- exchange.cu; `poison`: what the output of a broken group is filled with, where nothing is reduced
  void exchange(const Launch& launch, const cpu::Exchange& what, const void* input, void* output,
                const cpu::Payload& payload, uint64_t poison);

  // --- latency.cu
  static constexpr int64_t kMaxPingPongRounds = 10'000;
  /// `*elapsed_ns`, in device memory: what `rounds` round trips to `peer`, who calls it too, took; -1 when it
  /// did not come within about a second. The numbers `first` to `first + rounds` must be new to both.
  void ping_pong(const Launch& launch, int64_t peer, int64_t first, int64_t rounds, bool fence,
                 int64_t* elapsed_ns);

  /// What `auto` chooses and how wide a launch is, by payload; rows in ascending order of max_bytes, for the
  /// dtypes that they name, or for all that no row names.
  struct TuningRow {
    uint64_t max_bytes;
    Algo algo;
    uint32_t blocks;  // at most
    uint32_t threads;
    uint32_t dtypes = 0;  // a mask of bits 1 << DType; 0: the others
  };
  void set_tuning(std::vector<TuningRow> rows);

  /// Writes a pattern into, or checks it in, every peer's pad through this process's mappings; returns the
  /// ranks whose mapping does not work. Phase 0 writes, phase 1 checks what the peers wrote here, phase 2
  /// what is read from them.
  std::vector<int64_t> probe(int phase);

  // --- handle.cpp: what kernels of the user's own are given
  DeviceHandle handle(int64_t channel) const;
  /// Every rank's part of the buffer, as mapped into this process.
  std::vector<int64_t> parts(const cpu::Buffer& buffer) const { return device_buffer(buffer).parts; }

  /// Sets every counter of this rank, and what its peers have told it, to `epoch`, as if so many calls had
  /// been made. On all ranks, while none of their kernels runs.
  void preset(uint32_t epoch);

  /// The device's part in cpu::Group::rebase(): afterwards kernels find a group that is whole and new.
  void rebase();
  /// Behind a rebase() of which not all ranks have heard the end: kernels find a broken group.
  void break_again() const { set_status(DeviceStatus::kBroken); }

 private:
  friend class Turn;

  /// The last op of one channel: eager and inside the capture that was seen last.
  struct Last {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    unsigned long long capture = kNoCapture;
    bool used = false;
  };
  struct Order {
    std::mutex mutex;
    Last eager;
    Last captured;
  };

  template <class T>
  T* in_pad(uint32_t rank, size_t offset) const {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(m_config.pads[rank]) + offset);
  }
  PullController pull(uint32_t channel) const;
  SignalController signals(uint32_t channel) const;
  WaitContext context(uint32_t channel) const;
  Seat seat(const Launch& launch) const;
  void keep_in(cudaGraph_t graph);
  bool stop_graphs() const;
  void preload() const;
  void to_device(void* target, const void* source, size_t bytes) const;
  void clear(void* target, size_t bytes) const;
  void set_status(DeviceStatus status) const;
  const DeviceBuffer& device_buffer(const cpu::Buffer& buffer) const;
  /// Calls `row` with each that is for the dtype, while it returns true.
  template <class Row>
  void each_row(DType dtype, Row&& row) const;
  TuningRow choose(Algo algo, DType dtype, uint64_t bytes) const;
  template <bool kFence, bool kStart>
  void sync(const Launch& launch, Op op, int64_t channel);

  cpu::Group& m_host;
  DeviceConfig m_config;
  KeptMemory::Owner m_memory;
  std::atomic<unsigned long long> m_capture{kNoCapture};  // the last one in which there was an op of mine
  PadLayout m_layout;
  std::vector<PullController> m_pull;
  std::vector<SignalController> m_signal;
  WaitEscape* m_escape = nullptr;  // device memory
  void* m_registered = nullptr;    // the hosts' shared memory, mapped into the device
  std::vector<Order> m_orders;
  mutable std::shared_mutex m_tuning_mutex;
  std::vector<TuningRow> m_tuning;
  mutable std::shared_mutex m_buffers_mutex;
  std::unordered_map<std::string, DeviceBuffer> m_buffers;
};

/// Ops of one kind share their channel's counters. Signals and waits count apart, so that a wait on one
/// stream does not hold back the signal on another that it may be waiting for.
enum class Kind : uint32_t { kSync, kSignal, kWait };
inline constexpr uint32_t kKinds = 3;

/// One op's turn: ops of one kind on one channel run one after the other whatever streams they are on, also
/// inside a capture. It waits for the event of the op before, and records its own after the launch. (A
/// replayed graph is ordered against eager ops on another stream by the user, as any two streams are.)
class Turn {
 public:
  Turn(Group& group, uint32_t channel, Kind kind, cudaStream_t stream);
  /// After the launch. Throws if it failed.
  void end();

 private:
  std::unique_lock<std::mutex> m_lock;
  Group::Last* m_last;
  cudaStream_t m_stream;
};

/// The device part of `host`; throws when it has none.
Group& of(const cpu::Group& host);

}  // namespace gpusync::cuda

// One rank's view of a group whose ranks are processes (or threads) that share memory. No torch here: tensors
// have become pointers before (../cpu_kernels.cpp), and errors leave as std::runtime_error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpusync/pull_controller.h"
#include "gpusync/push_controller.h"
#include "interrupt.h"
#include "pages.h"

namespace gpusync::cpu {

class Wait;

struct GroupConfig {
  std::string name;
  uint32_t rank;
  uint32_t world_size;
  uint32_t channels;
  size_t staging_bytes;  // both halves of one rank
  double timeout;        // seconds
  int32_t global_rank;
  std::string host;
  bool pids_visible;  // can this process look up its peers' process ids?
};

/// A symmetric buffer: every rank's part has the same shape and lies `stride` bytes after the one before.
struct Buffer {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype;
  int64_t scalar_type;  // torch's number, carried for the caller
  size_t item_bytes;
  uint64_t numel;
  char* base;
  size_t stride;
  std::shared_ptr<void> keep_alive;
};

/// Throws when `numel` elements at `offset` do not lie inside the buffer.
void check_fits(const Buffer& buffer, int64_t offset, uint64_t numel, const char* op);

// What a collective stages at a time, however much staging memory there is: so little that a peer finds it in
// the second-level cache of the core that wrote it, so much that meeting is a small part of the work.
inline constexpr size_t kOneShotPart = 256 << 10;

/// What one round of an all-reduce works on.
struct Part {
  const char* input;
  char* output;
  uint64_t numel;
  DType dtype;
  ReduceOp reduce_op;
  uint32_t key;
};

/// One of the collectives in which every rank reads a piece of every rank's input.
struct Exchange {
  Op op;
  size_t item_bytes;                    // of an element
  int32_t scalar_type = 0;              // torch's number for the dtype
  ReduceOp reduce_op = ReduceOp::kSum;  // of reduce_scatter and reduce
  int64_t root = 0;                     // of broadcast and reduce

  bool has_root() const { return op == Op::kBroadcast || op == Op::kReduce; }
  bool reduces() const { return op == Op::kReduceScatter || op == Op::kReduce; }
  /// Has the input a part for every rank?
  bool is_split() const { return op == Op::kAllToAll || op == Op::kReduceScatter; }
};

class Group {
 public:
  /// `memory`: Layout's total_bytes(), shared by all ranks, zero before the first of them opened it.
  Group(GroupConfig config, void* memory, std::shared_ptr<void> keep_alive);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // --- sync.cpp: each is one call of a controller; throws when the wait is given up or the group is broken.
  void barrier(int64_t channel, bool fence);
  void pull_start(int64_t channel);
  void pull_end(int64_t channel, bool fence);
  void signal(int64_t destination, int64_t channel);
  void wait_signal(int64_t source, int64_t channel);
  uint32_t push_epoch(int64_t channel);
  void push_exit(int64_t channel);

  // --- buffers.cpp
  void add_buffer(Buffer buffer);
  const Buffer& buffer(const std::string& name) const;
  void put(const Buffer& buffer, int64_t rank, int64_t offset, const void* source, const Payload& payload);
  void get(const Buffer& buffer, int64_t rank, int64_t offset, void* target, const Payload& payload);

  // --- collectives.cpp
  void all_reduce(const void* input, void* output, const Payload& payload, ReduceOp reduce_op, Algo asked);

  // --- exchange.cpp
  void exchange(const Exchange& what, const void* input, void* output, const Payload& payload);
  CallKey exchange_key(const Exchange& what, const Payload& payload) const;

  // --- reset.cpp: what one rank does in a reset. All ranks meet between rebase() and revive(), and before.
  /// Is no call of this rank under way, in any of its threads? (A put or a get may be.)
  bool is_idle() const;
  /// Every counter of this rank, and what its peers have told it, as they were when the group was made. The
  /// group is broken afterwards.
  void rebase();
  /// The group is whole again.
  void revive();

  // --- failure.cpp
  enum class Verdict { kComplete, kRetry, kBroken };
  /// What a wait does whose time has expired, or that waits for a rank that is gone: decides, once for the
  /// whole group, whether it is broken. `missing` scans the wait's own slots anew. kComplete: they had all
  /// come; kRetry: the group lives on, and there is still somebody to wait for.
  Verdict give_up(Reason reason, const CallRecord& call, double waited, bool expired,
                  const std::function<uint64_t()>& missing);
  /// What `call` does when a decision is under way: waits for it, and takes it over should the deciding rank
  /// be gone. True: the group is not broken.
  bool settle(const CallRecord& call);
  [[noreturn]] void throw_broken(const CallRecord& call);
  /// Is it hopeless to wait for `rank`: its process is gone, or it has closed the group?
  bool is_gone(uint32_t rank) const;
  uint64_t gone_among(uint64_t ranks) const;
  /// Tells the peers what this rank sleeps for; null: for nothing any more. One wait of each rank is told: in
  /// a rank with several threads that wait, the last.
  void tell_awaiting(const Semaphore* mine, uint64_t expected, uint64_t ranks);
  /// Which ranks `rank` waits for at this moment, itself left out.
  uint64_t awaited_by(uint32_t rank) const;
  /// Null while the group is not broken.
  const FailureRecord* failure();
  /// The last calls of every rank, oldest first, as text.
  std::string dump() const;

  /// Throws in a forked child and on a broken group.
  void require_usable(const CallRecord& call);
  /// Starts a call: require_usable(), then numbers it, and records it for the peers.
  void begin(CallRecord& call);
  /// begin(), then `body(wait)`, then the check that no peer has given up what `body` completed.
  template <class Body>
  void synchronize(CallRecord call, uint64_t awaited, Body&& body);

  /// A zero-size collective: it advances nothing but a count, which the ranks must agree on.
  void skip(const CallKey& key, const Payload& payload);
  CallKey collective_key(Op op, const Payload& payload, ReduceOp reduce_op, Algo algo) const;

  // --- for ranks on GPUs (../cuda/): the device part of the group, and what its kernels see of the host
  void set_device_part(std::shared_ptr<void> part) { m_device_part = std::move(part); }
  void* device_part() const { return m_device_part.get(); }
  std::pair<void*, size_t> device_visible() const { return {m_memory, m_layout.staging(0, 0)}; }
  DeviceFailure* device_failure() const { return &group_page().device_failure; }
  const uint64_t* timeout_ns() const { return &page(m_config.rank).timeout_ns; }
  const uint64_t* gone() const { return &group_page().gone; }
  /// Tells the peers that this rank will make no more calls, and that all it made have run.
  void leave();

  // --- what the above and Wait share
  uint32_t checked_channel(int64_t channel) const;
  uint32_t checked_rank(int64_t rank) const;
  const GroupConfig& config() const { return m_config; }
  uint32_t world_size() const { return m_config.world_size; }
  uint32_t rank() const { return m_config.rank; }
  uint64_t all_ranks() const { return ~uint64_t{0} >> (kMaxRanks - m_config.world_size); }
  /// Is this a forked child, whose pages are its parent's?
  bool is_inherited() const;
  void require_own_process() const;
  double timeout() const { return static_cast<double>(load(page(m_config.rank).timeout_ns)) * 1e-9; }
  void set_timeout(double seconds);
  int spins() const { return m_spins; }
  RankPage& page(uint32_t rank) const { return *at<RankPage>(m_layout.rank_page(rank)); }
  State state() const {
    return {std::atomic_ref<uint32_t>(group_page().state).load(std::memory_order_seq_cst)};
  }
  /// Wakes `rank` should it sleep; after a publish to it.
  void ring_doorbell(uint32_t rank) const;
  /// How many calls this rank has made.
  uint32_t calls() const {
    return std::atomic_ref<uint32_t>(page(m_config.rank).calls).load(std::memory_order_relaxed);
  }
  /// Sets every counter of this rank, and what its peers have told it, to `epoch`, as if so many calls had
  /// been made. On all ranks, while none of them calls anything.
  void preset(uint32_t epoch);

 private:
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(m_memory) + offset);
  }
  static uint64_t load(const uint64_t& word) {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_relaxed);
  }
  static void store(uint64_t& word, uint64_t value) {
    std::atomic_ref<uint64_t>(word).store(value, std::memory_order_relaxed);
  }
  GroupPage& group_page() const { return *at<GroupPage>(0); }
  Channel& channel(uint32_t rank, uint32_t channel) const {
    return *at<Channel>(m_layout.channel(rank, channel));
  }
  /// The lock for one of the mutexes below. Looks for a fork first: in a child the one who holds it may be a
  /// thread of the parent, which the child does not have.
  std::unique_lock<std::mutex> take_turn(std::mutex& mutex) const {
    require_own_process();
    return std::unique_lock(mutex);
  }
  bool move_state(State from, State to);
  bool is_crossed(uint64_t absent) const;
  bool break_group(State deciding, Reason reason, const CallRecord& call, double waited, uint64_t missing);
  void take_over_device_failure();
  void clear_device_failure();
  void write_failure(Reason reason, const CallRecord& call, double waited, uint64_t missing, uint32_t rank,
                     const uint64_t* seen = nullptr);
  std::string describe_rank(uint32_t rank) const;
  std::string list_calls(const FailureRecord& record) const;
  std::string compare_histories(const FailureRecord& record) const;
  char* staging(uint32_t rank, uint32_t half) const { return at<char>(m_layout.staging(rank, half)); }
  uint32_t half() const;
  size_t push_slot_bytes() const;
  bool pull_one_shot(const Part& part, Wait& wait);
  bool pull_two_shot(const Part& part, Wait& wait);
  bool push_one_shot(const Part& part, Wait& wait);

  InterruptCounter m_interrupts;
  GroupConfig m_config;
  void* m_memory;
  std::shared_ptr<void> m_keep_alive;
  Layout m_layout;
  int m_spins;
  unsigned m_fork_generation;
  uint32_t m_skipped = 0;                 // zero-size collectives so far
  State m_reset_from{};                   // what rebase() has found
  std::deque<PullController> m_pull;      // one for each channel, the collectives' last
  std::deque<SignalController> m_signal;  // one for each of the user's channels
  std::deque<PushController> m_push;
  // Threads of this process take turns: on a channel's barriers, one for each whole wait (the collectives'
  // come last); on its signals and push counters, which must not wait for those, for a moment.
  mutable std::deque<std::mutex> m_channel_mutex;
  mutable std::deque<std::mutex> m_counter_mutex;
  std::atomic<uint32_t> m_signal_waits{0};  // under way: they take no turn
  mutable std::shared_mutex m_buffers_mutex;
  std::unordered_map<std::string, std::unique_ptr<Buffer>> m_buffers;
  std::shared_ptr<void> m_device_part;
};

}  // namespace gpusync::cpu

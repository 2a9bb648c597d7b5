// One channel of a SyncGroup on GPUs, for kernels of your own: SyncGroup.device_handle() returns it as bytes,
// and a kernel takes it by value. Its waits are bounded, its calls are compared between ranks, and its
// failures are the group's, as those of the ops are. docs/kernels.md has a complete example.
//
// Launching
// * A __grid_constant__ parameter, itself or inside another struct, so that nothing of it is copied.
// * Grid and block of one dimension, at most `max_blocks` blocks, the same number on all ranks. Blocks wait
//   for blocks of other ranks: that many are resident together, one on each multiprocessor, as long as no
//   other kernel keeps them out.
// * All threads of a block make each call together, as they would __syncthreads().
// * The counters are the channel's, and its ops (sync.barrier(channel=...), ...) count on: kernels and ops
//   of one channel must come in one order, on one stream or ordered by events. The library does that for its
//   own ops and does not know of your kernels. A channel that no op uses is yours to order.
//
// Memory order
// * Block b meets block b of every rank, and no other block. After a fenced call (barrier, pull_end<true>) it
//   sees what those blocks wrote before, and what earlier kernels of the ranks' streams wrote; not what
//   other blocks write in the same kernel.
// * A relaxed call (pull_start, pull_end) orders only what earlier kernels wrote, and not even that under
//   programmatic dependent launch.
// * Read what peers write with plain loads: `const T* __restrict__` and __ldg() let the compiler read through
//   a cache that the fences do not reach.
// * Before a peer's memory is written again its reader must be done: meet once more (pull_end), or use two
//   halves in turn (push_epoch, push_exit) of a size that does not change.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "gpusync/device_wait.h"
#include "gpusync/fingerprint.h"
#include "gpusync/pull_controller.h"
#include "gpusync/push_controller.h"
#include "gpusync/signal_controller.h"

namespace gpusync {

struct DeviceHandle {
  /// What these headers and the library have to agree on. Raised with every change of a layout or of what
  /// kernels write into one another's memory.
  static constexpr uint32_t kVersion = 1;

  uint32_t version;
  uint32_t bytes;  // sizeof(DeviceHandle)
  uint32_t rank;
  uint32_t world_size;
  uint32_t max_blocks;  // of one launch
  uint32_t reserved;
  // The controllers themselves, for what the methods below do not say; their `Wait` is DeviceWait(wait).
  WaitContext wait;
  PullController pull;
  SignalController signals;
  PushController push;

  /// The handle that SyncGroup.device_handle() returned, in host code.
  /// Throws std::runtime_error when a library with other headers made it.
  static DeviceHandle from_bytes(const void* data, size_t size) {
    uint32_t head[2] = {};
    if (size >= sizeof head) std::memcpy(head, data, sizeof head);
    if (head[0] != kVersion || head[1] != sizeof(DeviceHandle) || size != sizeof(DeviceHandle)) {
      throw std::runtime_error(
          "gpusync: a device handle of version " + std::to_string(head[0]) + " (" + std::to_string(size) +
          " bytes) was given to a kernel compiled for version " + std::to_string(kVersion) + " (" +
          std::to_string(sizeof(DeviceHandle)) +
          " bytes): compile it with the headers in torch_gpusync.include_path(), and pass what "
          "SyncGroup.device_handle() returned");
    }
    std::array<std::byte, sizeof(DeviceHandle)> copy;
    std::memcpy(copy.data(), data, sizeof copy);
    return std::bit_cast<DeviceHandle>(copy);
  }

  // --- What a kernel calls. False, on all threads of the block: the wait was given up or the group is
  // broken; then use nothing of a peer, make outputs say so (NaN), and return.
  //
  // `key`: what all ranks must agree on, for example the number of elements; kept as it is below 2^19.
  // Another key, fence or number of blocks is a SyncMismatchError.

  /// Waits for block b of every rank; releases and acquires.
  GPUSYNC_HD bool barrier(uint32_t key) const { return sync<true, true>(key); }
  /// Before peers' data is read that earlier kernels wrote: a relaxed barrier.
  GPUSYNC_HD bool pull_start(uint32_t key) const { return sync<false, true>(key); }
  /// After it was read; with kFence it releases and acquires. Counts apart from the two above.
  template <bool kFence = false>
  GPUSYNC_HD bool pull_end(uint32_t key) const {
    return sync<kFence, false>(key);
  }

  /// Adds one to the counter that rank `dst` waits on, in a kernel or in sync.wait_signal(); releases what
  /// this block wrote. In one block at a time for each `dst`. A broken group's signals go nowhere.
  GPUSYNC_HD void signal(uint32_t dst) const {
    if (is_allowed(kSignalKey)) signals.signal(dst, kSignalKey, DeviceWait(wait));
  }
  /// Consumes one signal of rank `src`, of a kernel or of sync.signal(); acquires. In one block at a time for
  /// each `src`.
  GPUSYNC_HD bool wait_signal(uint32_t src) const {
    return is_allowed(kSignalKey) && signals.wait(src, kSignalKey, DeviceWait(wait, uint64_t{1} << src));
  }

  /// The half, 0 or 1, that this launch works in.
  GPUSYNC_HD uint32_t push_epoch() const {
    return is_allowed(fingerprint({.op = Op::kPushEpoch})) ? push.epoch() : 0;
  }
  /// The next launch works in the other half. Every block calls it once.
  GPUSYNC_HD void push_exit() const {
    if (is_allowed(fingerprint({.op = Op::kPushExit}))) push.exit_all(max_blocks);
  }

 private:
  static constexpr uint32_t kSignalKey = fingerprint({.op = Op::kSignal});  // as of the ops

  /// Breaks the group for a launch that it does not allow: beyond max_blocks lies what is the next channel's.
  GPUSYNC_HD bool is_allowed(uint32_t fingerprint) const {
    if (block::count() <= max_blocks && block::is_flat()) return true;
    if (block::lane() == 0) DeviceWait(wait).fail(DeviceReason::kBadGrid, fingerprint);
    return false;
  }

  template <bool kFence, bool kStart>
  GPUSYNC_HD bool sync(uint32_t key) const {
    const uint32_t fingerprint = user_key(key, block::count(), kFence);
    return is_allowed(fingerprint) && pull.sync<kFence, kStart>(fingerprint, DeviceWait(wait));
  }
};

static_assert(std::is_trivially_copyable_v<DeviceHandle> && std::is_standard_layout_v<DeviceHandle>);
// A change here is a new kVersion.
static_assert(sizeof(DeviceHandle) == 1096 && sizeof(Semaphore) == 768 && sizeof(Mailbox) == 1280 &&
              sizeof(WaitEscape) == 552 && sizeof(DeviceFailure) == 552);

}  // namespace gpusync

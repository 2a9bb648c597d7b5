// Every method of every controller in a kernel of its own, for test_ptx.py, which reads the code that they
// become. They are compiled and looked at, never run.
//
// Controllers are kernel parameters, as in the library: a controller that the compiler copied to local memory
// would show.
#include "gpusync/device_wait.h"
#include "gpusync/pull_controller.h"
#include "gpusync/push_controller.h"
#include "gpusync/signal_controller.h"

namespace {

using gpusync::DeviceWait;
using gpusync::PullController;
using gpusync::PushController;
using gpusync::Seen;
using gpusync::Semaphore;
using gpusync::SignalController;
using gpusync::WaitContext;

/// The least a wait can do: it polls a number of times. What a kernel has beyond it is the controller's own.
struct Polls {
  uint32_t count;

  __device__ bool ready() const { return true; }
  __device__ void notify(uint32_t) const {}
  __device__ bool until(const Semaphore& mine, uint32_t peer, uint64_t expected) const {
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      const Seen seen = gpusync::compare(mine.peek(peer), expected);
      if (seen == Seen::kMismatch) return false;
      if (seen == Seen::kArrived) {
        mine.acquire_from(peer);
        return true;
      }
    }
    return false;
  }
  __device__ bool settle() const { return true; }
  __device__ bool persist(const Semaphore&, uint32_t, uint64_t) const { return false; }
};

}  // namespace

// ---- Semaphore
extern "C" __global__ void semaphore_arrive_fenced(Semaphore* theirs, uint32_t me, uint64_t arrival) {
  theirs->arrive<true>(me, arrival);
}

extern "C" __global__ void semaphore_arrive_relaxed(Semaphore* theirs, uint32_t me, uint64_t arrival) {
  theirs->arrive<false>(me, arrival);
}

extern "C" __global__ void semaphore_peek(const Semaphore* mine, uint32_t peer, uint64_t* slot) {
  *slot = mine->peek(peer);
}

extern "C" __global__ void semaphore_acquire_from(const Semaphore* mine, uint32_t peer, uint64_t* slot) {
  *slot = mine->acquire_from(peer);
}

// ---- PullController
extern "C" __global__ void pull_start_fenced(const __grid_constant__ PullController pull, uint32_t key,
                                             uint32_t polls) {
  pull.sync<true, true>(key, Polls{polls});
}

extern "C" __global__ void pull_start_relaxed(const __grid_constant__ PullController pull, uint32_t key,
                                              uint32_t polls) {
  pull.sync<false, true>(key, Polls{polls});
}

extern "C" __global__ void pull_end_fenced(const __grid_constant__ PullController pull, uint32_t key,
                                           uint32_t polls) {
  pull.sync<true, false>(key, Polls{polls});
}

extern "C" __global__ void pull_end_relaxed(const __grid_constant__ PullController pull, uint32_t key,
                                            uint32_t polls) {
  pull.sync<false, false>(key, Polls{polls});
}

/// In a kernel that does nothing else.
extern "C" __global__ void pull_alone(const __grid_constant__ PullController pull, uint32_t key,
                                      uint32_t polls) {
  pull.sync<true, true, gpusync::block::Alone>(key, Polls{polls});
}

extern "C" __global__ void pull_announce(const __grid_constant__ PullController pull, uint32_t key) {
  pull.announce(gpusync::Arrival{1, key}, Polls{0});
}

/// A whole pull: what a rank does with its peers' data stays between its two barriers.
extern "C" __global__ void pull_start_read_end(const __grid_constant__ PullController pull,
                                               const float* theirs, float* mine, uint32_t polls) {
  if (!pull.sync<true, true>(1, Polls{polls})) return;
  mine[threadIdx.x] = theirs[threadIdx.x];
  pull.sync<false, false>(2, Polls{polls});
}

/// With the library's own wait.
extern "C" __global__ void pull_device_wait(const __grid_constant__ PullController pull,
                                            const __grid_constant__ WaitContext context, uint32_t key) {
  pull.sync<true, true>(key, DeviceWait(context));
}

// ---- SignalController
extern "C" __global__ void signal_send(const __grid_constant__ SignalController signals, uint32_t peer,
                                       uint32_t key) {
  signals.signal(peer, key, Polls{0});
}

extern "C" __global__ void signal_wait(const __grid_constant__ SignalController signals, uint32_t peer,
                                       uint32_t key, uint32_t polls) {
  signals.wait(peer, key, Polls{polls});
}

// ---- PushController
extern "C" __global__ void push_epoch(const __grid_constant__ PushController push, uint32_t* half) {
  *half = push.epoch();
}

extern "C" __global__ void push_call(const __grid_constant__ PushController push, uint32_t* calls) {
  *calls = push.call();
}

extern "C" __global__ void push_exit(const __grid_constant__ PushController push) { push.exit(); }

extern "C" __global__ void push_exit_all(const __grid_constant__ PushController push, uint32_t blocks) {
  push.exit_all(blocks);
}

extern "C" __global__ void push_exit_unsafe(const __grid_constant__ PushController push, uint32_t block) {
  push.exit_unsafe(block);
}

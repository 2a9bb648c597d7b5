#include "group.h"

#include <cstddef>

#include "check.h"
#include "launches.h"

namespace gpusync::cuda {

Group::Group(cpu::Group& host, DeviceConfig config, KeptMemory::Parts memory)
    : m_host(host),
      m_config(std::move(config)),
      m_memory(KeptMemory::make(std::move(memory))),
      m_layout(host.config().channels, m_config.staging_bytes),
      m_orders((host.config().channels + 1) * kKinds) {
  KeptMemory::free_left();
  const DeviceGuard guard(m_config.device);
  const uint32_t world_size = host.world_size();
  const uint32_t rank = host.rank();
  for (uint32_t c = 0; c <= host.config().channels; ++c) {
    Semaphore* rows[kMaxRanks];
    Mailbox* mailboxes[kMaxRanks];
    for (uint32_t r = 0; r < world_size; ++r) {
      rows[r] = in_pad<Semaphore>(r, m_layout.semaphores(c));
      mailboxes[r] = in_pad<Mailbox>(r, m_layout.mailbox(c));
    }
    m_pull.emplace_back(rows, rank, world_size);
    m_signal.emplace_back(mailboxes, rank, world_size);
  }

  // The hosts' shared memory, for the failure record and the timeout.
  const auto [address, bytes] = host.device_visible();
  check(cudaHostRegister(address, bytes, cudaHostRegisterMapped),
        "cudaHostRegister of the hosts' shared memory");
  m_registered = address;
  void* mapped = nullptr;
  check(cudaHostGetDevicePointer(&mapped, address, 0), "cudaHostGetDevicePointer");
  const auto on_device = [&](auto* p) {
    return reinterpret_cast<decltype(p)>(
        static_cast<char*>(mapped) + (reinterpret_cast<const char*>(p) - static_cast<const char*>(address)));
  };
  WaitEscape escape{};
  escape.claim = in_pad<uint32_t>(0, m_layout.claim());
  for (uint32_t r = 0; r < world_size; ++r) escape.status[r] = in_pad<uint32_t>(r, m_layout.status());
  escape.failure = on_device(host.device_failure());
  escape.timeout_ns = on_device(host.timeout_ns());
  escape.gone = on_device(host.gone());
  escape.rank = rank;
  escape.world_size = world_size;
  check(cudaMalloc(reinterpret_cast<void**>(&m_escape), sizeof escape), "cudaMalloc");
  to_device(m_escape, &escape, sizeof escape);
  for (Order& order : m_orders) {
    check(cudaEventCreateWithFlags(&order.eager.event, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaEventCreateWithFlags(&order.captured.event, cudaEventDisableTiming), "cudaEventCreate");
  }
  preload();
}

/// The copy is complete when it returns, for kernels on any stream: cudaMemcpy alone may have it on its way.
void Group::to_device(void* target, const void* source, size_t bytes) const {
  check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, cudaStreamPerThread),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

void Group::clear(void* target, size_t bytes) const {
  check(cudaMemsetAsync(target, 0, bytes, cudaStreamPerThread), "cudaMemsetAsync");
  check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

/// Of my own pad: what my kernels look at.
void Group::set_status(DeviceStatus status) const {
  const DeviceGuard guard(m_config.device);
  const auto word = static_cast<uint32_t>(status);
  to_device(in_pad<uint32_t>(m_host.rank(), m_layout.status()), &word, sizeof word);
}

void Group::rebase() {
  preset(0);
  const DeviceGuard guard(m_config.device);
  const uint32_t me = m_host.rank();
  // The flags of pushed data are numbers of calls, which begin anew.
  clear(in_pad<char>(me, m_layout.push_area()), kHalves * m_layout.half_bytes());
  if (me == 0) clear(in_pad<uint32_t>(0, m_layout.claim()), sizeof(uint32_t));
  set_status(DeviceStatus::kWhole);
}

void Group::preset(uint32_t epoch) {
  const DeviceGuard guard(m_config.device);
  const uint32_t me = m_host.rank();
  std::vector<Semaphore> semaphores(PullController::kStages * kMaxBlocks);
  const std::vector<uint32_t> calls(kMaxBlocks, epoch);
  Mailbox mailbox{};
  for (uint32_t r = 0; r < m_host.world_size(); ++r) {
    const auto tell = [&](Semaphore& semaphore) {
      semaphore.arrive<true>(r, Arrival{epoch, 0}.pack());
      semaphore.set_epoch(r, epoch);
    };
    for (Semaphore& semaphore : semaphores) tell(semaphore);
    tell(mailbox.inbox);
    mailbox.sent[r] = mailbox.seen[r] = epoch;
  }
  for (uint32_t c = 0; c <= m_host.config().channels; ++c) {
    to_device(in_pad<char>(me, m_layout.semaphores(c)), semaphores.data(),
              semaphores.size() * sizeof(Semaphore));
    to_device(in_pad<char>(me, m_layout.mailbox(c)), &mailbox, sizeof mailbox);
    to_device(in_pad<char>(me, m_layout.push_calls(c)), calls.data(), calls.size() * sizeof calls[0]);
  }
}

Group::~Group() {
  const OutsideCaptures outside;
  int before = 0;
  // At exit the driver may be gone already, and with it all that would be freed here.
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(m_config.device) != cudaSuccess) return;
  // What frees memory waits for everything in this process, other ranks' waits for this one included: so they
  // are told first, but not before what this rank launched has run.
  for (Order& order : m_orders) {
    if (order.eager.event != nullptr) (void)cudaEventSynchronize(order.eager.event);
  }
  m_host.leave();
  if (m_capture.load() != kNoCapture && !stop_graphs()) {
    m_escape = nullptr;  // what a graph may still touch is left to it
    m_registered = nullptr;
  }
  for (Order& order : m_orders) {
    if (order.eager.event != nullptr) (void)cudaEventDestroy(order.eager.event);
    if (order.captured.event != nullptr) (void)cudaEventDestroy(order.captured.event);
  }
  if (m_escape != nullptr) (void)cudaFree(m_escape);  // waits for kernels that may still read it
  if (m_registered != nullptr) (void)cudaHostUnregister(m_registered);
  m_memory.reset();
  KeptMemory::free_left();
  (void)cudaSetDevice(before);
}

/// What graphs have under way ends first; those that are replayed from now on find a broken group and touch
/// nothing but m_memory. (Freeing the rest waits for what began between the two.) False: that could not be
/// done.
bool Group::stop_graphs() const {
  wait_for_device();
  try {
    set_status(DeviceStatus::kBroken);
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

void Group::keep_in(cudaGraph_t graph) {
  KeptMemory::Owner owner = m_memory->share();
  cudaUserObject_t object{};
  check(cudaUserObjectCreate(
            &object, owner.get(), [](void* memory) { static_cast<KeptMemory*>(memory)->let_go_later(); }, 1,
            cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
  (void)owner.release();  // the object's now
  const cudaError_t status = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (status != cudaSuccess) (void)cudaUserObjectRelease(object, 1);
  check(status, "cudaGraphRetainUserObject");
}

unsigned long long Group::capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive) return kNoCapture;
  if (m_capture.load(std::memory_order_relaxed) != capture) {
    keep_in(captured_graph(stream));
    m_capture.store(capture, std::memory_order_relaxed);
  }
  return capture;
}

WaitContext Group::context(uint32_t channel) const {
  return {in_pad<uint32_t>(m_host.rank(), m_layout.status()), m_escape, channel};
}

Seat Group::seat(const Launch& launch) const {
  const uint32_t channel = m_host.config().channels;
  return {m_pull[channel], context(channel), m_layout, m_config.pads.data(), launch.token};
}

Turn::Turn(Group& group, uint32_t channel, Kind kind, cudaStream_t stream) : m_stream(stream) {
  Group::Order& order = group.m_orders[channel * kKinds + static_cast<uint32_t>(kind)];
  m_lock = std::unique_lock(order.mutex);
  const unsigned long long capture = group.capture_of(stream);
  const bool capturing = capture != Group::kNoCapture;
  m_last = capturing ? &order.captured : &order.eager;
  if (capturing && m_last->capture != capture) m_last->used = false;  // another graph: nothing in it yet
  m_last->capture = capture;
  if (m_last->used && m_last->stream != stream) {
    check(cudaStreamWaitEvent(stream, m_last->event, 0), "cudaStreamWaitEvent");
  }
}

void Turn::end() {
  check(cudaGetLastError(), "a kernel launch");
  check(cudaEventRecord(m_last->event, m_stream), "cudaEventRecord");
  m_last->stream = m_stream;
  m_last->used = true;
}

Group& of(const cpu::Group& host) {
  auto* group = static_cast<Group*>(host.device_part());
  if (group == nullptr) {
    throw std::runtime_error("gpusync: group '" + host.config().name +
                             "' is a CPU group: make a SyncGroup(device='cuda') for CUDA tensors");
  }
  return *group;
}

}  // namespace gpusync::cuda

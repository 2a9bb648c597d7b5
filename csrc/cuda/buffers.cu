// put and get: copies between a tensor and some rank's part of a symmetric buffer, by ordinary loads and
// stores. The barrier or signal that follows makes them visible: a kernel's writes are complete when the next
// kernel of its stream starts, and a fenced arrival there releases them to the system.
#include <algorithm>

#include "check.h"
#include "group.h"
#include "kernels.h"

namespace gpusync::cuda {
namespace {

struct CopyParams {
  char* part;      // the rank's part of the buffer
  char* tensor;    // contiguous
  uint64_t numel;  // to copy
  uint64_t part_numel;
  uint32_t item_bytes;
  uint64_t poison;
  Offset offset;
  WaitContext wait;
  int32_t* token;
  uint32_t key;
};

constexpr uint32_t kThreads = 256;
constexpr uint32_t kMaxCopyBlocks = 1024;

template <class Word>
__device__ __forceinline__ void copy_words(char* target, const char* source, uint64_t bytes) {
  auto* to = reinterpret_cast<Word*>(target);
  const auto* from = reinterpret_cast<const Word*>(source);
  const uint64_t words = bytes / sizeof(Word);
  const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (uint64_t i = first; i < words; i += uint64_t{gridDim.x} * blockDim.x) to[i] = from[i];
  const uint64_t rest = words * sizeof(Word) + first;
  if (rest < bytes) target[rest] = source[rest];
}

/// 16 bytes at a time where both sides lie alike, else the widest word that fits.
__device__ __forceinline__ void copy_bytes(char* target, const char* source, uint64_t bytes) {
  const uintptr_t alignment = reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source);
  if (alignment % 16 == 0) {
    copy_words<uint4>(target, source, bytes);
  } else if (alignment % 8 == 0) {
    copy_words<uint2>(target, source, bytes);
  } else if (alignment % 4 == 0) {
    copy_words<uint32_t>(target, source, bytes);
  } else if (alignment % 2 == 0) {
    copy_words<uint16_t>(target, source, bytes);
  } else {
    copy_words<uint8_t>(target, source, bytes);
  }
}

template <bool kPut>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyParams p) {
  touch(p.token);
  DeviceWait wait(p.wait);
  const int64_t offset = p.offset.device != nullptr ? *p.offset.device : p.offset.value;
  const bool fits =
      offset >= 0 && static_cast<uint64_t>(offset) <= p.part_numel && p.numel <= p.part_numel - offset;
  const uint64_t bytes = p.numel * p.item_bytes;
  const bool whole = wait.ready() || wait.settle();
  if (!fits || !whole) {
    // An offset that only the device knows cannot be refused before: it breaks the group. One that is broken
    // may be closed, and must not be touched.
    if (whole && blockIdx.x == 0 && threadIdx.x == 0) wait.fail(DeviceReason::kBadOffset, p.key);
    if (!kPut) fill_poison(p.tensor, bytes, p.poison);
    return;
  }
  char* part = p.part + offset * p.item_bytes;
  if (kPut) {
    copy_bytes(part, p.tensor, bytes);
  } else {
    copy_bytes(p.tensor, part, bytes);
  }
}

template <bool kPut>
void copy(const Launch& launch, const CopyParams& params) {
  const uint64_t words = params.numel * params.item_bytes / 16;
  const auto blocks = static_cast<uint32_t>(std::clamp<uint64_t>(words / kThreads, 1, kMaxCopyBlocks));
  copy_kernel<kPut><<<blocks, kThreads, 0, launch.stream>>>(params);
  check(cudaGetLastError(), "a kernel launch");
}

char* address(int64_t part) { return reinterpret_cast<char*>(static_cast<uintptr_t>(part)); }

}  // namespace

void preload_buffers() {
  load_kernel(copy_kernel<true>);
  load_kernel(copy_kernel<false>);
}

void Group::add_buffer(const std::string& name, DeviceBuffer buffer) {
  const std::unique_lock lock(m_buffers_mutex);
  m_buffers.insert_or_assign(name, std::move(buffer));
}

const DeviceBuffer& Group::device_buffer(const cpu::Buffer& buffer) const {
  const std::shared_lock lock(m_buffers_mutex);
  return m_buffers.at(buffer.name);
}

void Group::put(const Launch& launch, const cpu::Buffer& buffer, int64_t rank, Offset offset,
                const void* source, const cpu::Payload& payload) {
  const uint32_t target = rank == -1 ? m_host.rank() : m_host.checked_rank(rank);
  if (offset.device == nullptr) cpu::check_fits(buffer, offset.value, payload.numel, "put");
  cpu::CallRecord call = cpu::record(Op::kPut, payload, target);
  m_host.begin(call);
  if (payload.numel == 0) return;
  const DeviceBuffer& device = device_buffer(buffer);
  (void)capture_of(launch.stream);
  copy<true>(launch,
             {address(device.parts[target]), const_cast<char*>(static_cast<const char*>(source)),
              payload.numel, buffer.numel, static_cast<uint32_t>(buffer.item_bytes), device.poison, offset,
              context(m_host.config().channels), launch.token, fingerprint({.op = Op::kPut})});
}

void Group::get(const Launch& launch, const cpu::Buffer& buffer, int64_t rank, Offset offset, void* target,
                const cpu::Payload& payload) {
  const uint32_t source = rank == -1 ? m_host.rank() : m_host.checked_rank(rank);
  if (offset.device == nullptr) cpu::check_fits(buffer, offset.value, payload.numel, "get");
  cpu::CallRecord call = cpu::record(Op::kGet, payload, source);
  m_host.begin(call);
  if (payload.numel == 0) return;
  const DeviceBuffer& device = device_buffer(buffer);
  (void)capture_of(launch.stream);
  copy<false>(launch, {address(device.parts[source]), static_cast<char*>(target), payload.numel, buffer.numel,
                       static_cast<uint32_t>(buffer.item_bytes), device.poison, offset,
                       context(m_host.config().channels), launch.token, fingerprint({.op = Op::kGet})});
}

}  // namespace gpusync::cuda

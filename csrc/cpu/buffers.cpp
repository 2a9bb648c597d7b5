// Symmetric buffers: every rank can write to (put) and read from (get) every rank's part. Neither waits for
// anybody: barriers and signals say when.
#include <cstring>

#include "group.h"

namespace gpusync::cpu {
namespace {

char* locate(const Buffer& buffer, uint32_t rank, int64_t offset, const Payload& payload, const char* op) {
  check_fits(buffer, offset, payload.numel, op);
  return buffer.base + rank * buffer.stride + static_cast<uint64_t>(offset) * buffer.item_bytes;
}

}  // namespace

void check_fits(const Buffer& buffer, int64_t offset, uint64_t numel, const char* op) {
  if (offset < 0 || static_cast<uint64_t>(offset) > buffer.numel || numel > buffer.numel - offset) {
    throw std::runtime_error(std::string("gpusync: ") + op + " of " + std::to_string(numel) +
                             " elements at offset " + std::to_string(offset) + " does not fit buffer '" +
                             buffer.name + "' of " + std::to_string(buffer.numel) +
                             " elements: offsets count elements, and nothing "
                             "was copied");
  }
}

void Group::add_buffer(Buffer buffer) {
  const std::unique_lock lock(m_buffers_mutex);
  std::string name = buffer.name;
  const bool added = m_buffers.emplace(name, std::make_unique<Buffer>(std::move(buffer))).second;
  if (!added)
    throw std::runtime_error("gpusync: group '" + m_config.name + "' already has a buffer '" + name + "'");
}

const Buffer& Group::buffer(const std::string& name) const {
  const std::shared_lock lock(m_buffers_mutex);
  const auto found = m_buffers.find(name);
  if (found == m_buffers.end()) {
    std::string known;
    for (const auto& entry : m_buffers) known += (known.empty() ? "'" : ", '") + entry.first + "'";
    throw std::runtime_error("gpusync: group '" + m_config.name + "' has no buffer '" + name + "' (it has " +
                             (known.empty() ? "none" : known) +
                             "): make it with sync.buffer(name, shape, dtype) on all "
                             "ranks");
  }
  return *found->second;
}

void Group::put(const Buffer& buffer, int64_t rank, int64_t offset, const void* source,
                const Payload& payload) {
  const uint32_t target = rank == -1 ? m_config.rank : checked_rank(rank);
  char* destination = locate(buffer, target, offset, payload, "put");
  CallRecord call = record(Op::kPut, payload, target);
  begin(call);
  if (payload.numel != 0) std::memcpy(destination, source, payload.numel * buffer.item_bytes);
}

void Group::get(const Buffer& buffer, int64_t rank, int64_t offset, void* target, const Payload& payload) {
  const uint32_t source_rank = rank == -1 ? m_config.rank : checked_rank(rank);
  const char* source = locate(buffer, source_rank, offset, payload, "get");
  CallRecord call = record(Op::kGet, payload, source_rank);
  begin(call);
  if (payload.numel != 0) std::memcpy(target, source, payload.numel * buffer.item_bytes);
}

}  // namespace gpusync::cpu

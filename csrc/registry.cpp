#include "registry.h"

#include <pthread.h>

#include <functional>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace gpusync {
namespace {

/// Looks names up without making strings of them.
struct NameHash {
  using is_transparent = void;
  size_t operator()(std::string_view name) const { return std::hash<std::string_view>()(name); }
};

std::shared_mutex g_mutex;
std::unordered_map<std::string, std::shared_ptr<cpu::Group>, NameHash, std::equal_to<>> g_groups;

/// A fork while another thread looks a group up would leave the child with a lock that nobody opens.
void hold_over_forks() {
  // The child's is made anew: the lock knows its writer by a thread id, which the child has not.
  static const int held = pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); },
                                         [] { new (&g_mutex) std::shared_mutex; });
  (void)held;
}

}  // namespace

std::shared_ptr<cpu::Group> find_group(std::string_view name) {
  const std::shared_lock lock(g_mutex);
  const auto found = g_groups.find(name);
  if (found == g_groups.end()) {
    throw std::runtime_error("gpusync: this process has no group '" + std::string(name) +
                             "': it was never made here, or it was closed (keep its SyncGroup alive)");
  }
  return found->second;
}

std::shared_ptr<cpu::Group> find_cpu_group(std::string_view name) {
  auto group = find_group(name);
  if (group->device_part() != nullptr) {
    throw std::runtime_error("gpusync: group '" + std::string(name) +
                             "' is on a GPU, but the token or the tensor is on "
                             "the CPU: pass sync.token and tensors on sync.device");
  }
  return group;
}

void add_group(const std::string& name, std::shared_ptr<cpu::Group> group) {
  hold_over_forks();
  std::shared_ptr<cpu::Group> inherited;  // destroyed outside the lock
  const std::unique_lock lock(g_mutex);
  const auto [place, added] = g_groups.emplace(name, group);
  if (!added && place->second->is_inherited()) {
    // A forked child has the names of its parent's groups for its own.
    inherited = std::exchange(place->second, std::move(group));
  } else if (!added) {
    throw std::runtime_error("gpusync: this process already has a group '" + name +
                             "': close it first, or give one of them another name");
  }
}

bool remove_group(const std::string& name) {
  std::shared_ptr<cpu::Group> last;  // destroyed outside the lock
  const std::unique_lock lock(g_mutex);
  const auto found = g_groups.find(name);
  if (found == g_groups.end()) return false;
  last = std::move(found->second);
  g_groups.erase(found);
  return true;
}

}  // namespace gpusync

// From a group's name, which is what compiled graphs hold, to the group.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "cpu/group.h"

namespace gpusync {

/// Throws when the process has no open group of this name.
std::shared_ptr<cpu::Group> find_group(std::string_view name);

/// The same, and throws when the group is on a GPU.
std::shared_ptr<cpu::Group> find_cpu_group(std::string_view name);

/// Throws when the name is taken.
void add_group(const std::string& name, std::shared_ptr<cpu::Group> group);

/// Forgets the group; calls that are under way keep it alive until they return. True when there was one.
bool remove_group(const std::string& name);

}  // namespace gpusync

// Boxing for the ops that take the token, a group's name and a few numbers, and return nothing. They do so
// little else that TORCH_BOX is an eighth of their time: it allocates for the tensor and copies the string.
// Here the arguments are used where they lie on the stack, which their kernel owns, and are given back from
// there.
#pragma once

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "registry.h"
#include "tensor_args.h"

namespace gpusync {

class StackTensor {
 public:
  explicit StackTensor(StableIValue value) : m_handle(torch::stable::detail::to<AtenTensorHandle>(value)) {}
  ~StackTensor() { aoti_torch_delete_tensor_object(m_handle); }
  StackTensor(const StackTensor&) = delete;
  StackTensor& operator=(const StackTensor&) = delete;

  AtenTensorHandle get() const { return m_handle; }

 private:
  AtenTensorHandle m_handle;
};

class StackString {
 public:
  explicit StackString(StableIValue value) : m_handle(torch::stable::detail::to<StringHandle>(value)) {}
  ~StackString() { torch_delete_string(m_handle); }
  StackString(const StackString&) = delete;
  StackString& operator=(const StackString&) = delete;

  std::string_view view() const {
    const char* data = nullptr;
    size_t length = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(m_handle, &data));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(m_handle, &length));
    return {data, length};
  }

 private:
  StringHandle m_handle;
};

inline void check_stack(bool fits) {
  if (!fits) throw std::logic_error("gpusync: a kernel does not fit its schema");
}

template <auto kMethod>
struct LightBox;

/// LightBox<&cpu::Group::barrier>::kernel is the CPU kernel that calls this method of the group.
template <class... Numbers, void (cpu::Group::*kMethod)(Numbers...)>
struct LightBox<kMethod> {
  static void kernel(StableIValue* stack, uint64_t n_arguments, uint64_t n_results) {
    check_stack(n_arguments == 2 + sizeof...(Numbers) && n_results == 0);
    const StackTensor token(stack[0]);
    const StackString name(stack[1]);
    const auto group = find_cpu_group(name.view());
    touch(token_address(token.get()));
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      (group.get()->*kMethod)(torch::stable::detail::to<Numbers>(stack[2 + kIndex])...);
    }(std::index_sequence_for<Numbers...>{});
  }
};

}  // namespace gpusync

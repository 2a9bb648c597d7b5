// From torch's arguments to gpusync's: shared by the kernels of all devices.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/group.h"

#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)  // its name in torch 2.11 and 2.12
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace gpusync {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int32_t* token_address(AtenTensorHandle token) {
  int64_t numel = 0;
  int32_t type = 0;
  void* address = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(token, &numel));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(token, &type));
  if (numel < 1 || type != aoti_torch_dtype_int32()) {
    throw std::runtime_error("gpusync: the first argument must be the group's ordering token (sync.token)");
  }
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(token, &address));
  return static_cast<int32_t*>(address);
}

/// On the CPU: makes the schema's `Tensor(a!) token` true; nothing depends on the value.
inline void touch(int32_t* token) {
  std::atomic_ref<int32_t>(*token).fetch_add(1, std::memory_order_relaxed);
}

inline DType to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Int: return DType::kInt32;
    case ScalarType::Long: return DType::kInt64;
    default: return DType::kOther;
  }
}

inline ReduceOp to_reduce_op(std::string_view name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "max") return ReduceOp::kMax;
  if (name == "min") return ReduceOp::kMin;
  if (name == "avg") return ReduceOp::kAvg;
  throw std::runtime_error("gpusync: unknown reduce_op '" + std::string(name) +
                           "': use 'sum', 'max', 'min' or 'avg'");
}

inline Algo to_algo(std::string_view name) {
  if (name == "auto") return Algo::kNone;
  if (name == "pull_one_shot") return Algo::kPullOneShot;
  if (name == "pull_two_shot") return Algo::kPullTwoShot;
  if (name == "push_one_shot") return Algo::kPushOneShot;
  throw std::runtime_error("gpusync: unknown algo '" + std::string(name) +
                           "': use 'auto', 'pull_one_shot', 'pull_two_shot' or 'push_one_shot'");
}

/// An uninitialised contiguous tensor of x's shape, dtype and device. (An aten op through the stable ABI,
/// new_empty for one, takes 0.4 µs more: it boxes its arguments.)
inline Tensor empty_packed(const Tensor& x) {
  const auto sizes = x.sizes();
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device_index));
  AtenTensorHandle result = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                         strides.data(), dtype, device_type, device_index,
                                                         &result));
  return Tensor(result);
}

inline Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

inline cpu::Payload payload_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return {to_dtype(x.scalar_type()), static_cast<uint64_t>(x.numel()), {sizes.data(), sizes.size()}};
}

/// The element type of a `get`'s result; `expected` is what the caller was compiled for.
inline ScalarType dtype_of_get(const cpu::Buffer& buffer, std::optional<ScalarType> expected) {
  const auto type = static_cast<ScalarType>(buffer.scalar_type);
  if (expected && *expected != type) {
    throw std::runtime_error("gpusync: get from buffer '" + buffer.name +
                             "' expects another dtype than the buffer has: "
                             "was it made anew under the same name after this function was compiled?");
  }
  return type;
}

inline const std::vector<int64_t>& shape_of_get(const cpu::Buffer& buffer,
                                                const std::optional<std::vector<int64_t>>& size) {
  const std::vector<int64_t>& shape = size ? *size : buffer.shape;
  for (const int64_t extent : shape) {
    if (extent < 0) throw std::runtime_error("gpusync: get needs sizes of zero or more");
  }
  return shape;
}

/// How many elements a tensor of this shape has; the largest number there is when it has more.
inline uint64_t numel_of(const std::vector<int64_t>& shape) {
  uint64_t numel = 1;
  for (const int64_t extent : shape) {
    if (extent == 0) return 0;
    if (__builtin_mul_overflow(numel, static_cast<uint64_t>(extent), &numel)) numel = ~uint64_t{0} >> 1;
  }
  return numel;
}

inline void check_dtype_of_put(const cpu::Buffer& buffer, const Tensor& x) {
  if (static_cast<int64_t>(x.scalar_type()) != buffer.scalar_type) {
    throw std::runtime_error("gpusync: put into buffer '" + buffer.name +
                             "' needs the buffer's dtype: convert with "
                             "x.to(buffer.dtype)");
  }
}

/// The shape of what becomes of x where dimension 0 is split into `parts`, and `times` of them are joined.
inline std::vector<int64_t> shape_of_exchange(const Tensor& x, const char* op, uint32_t times,
                                              uint32_t parts) {
  const auto sizes = x.sizes();
  if (sizes.empty()) {
    throw std::runtime_error(std::string("gpusync: ") + op +
                             " works along dimension 0, and x has none: pass x.reshape(1)");
  }
  if (sizes[0] % parts != 0) {
    throw std::runtime_error(std::string("gpusync: ") + op + " splits dimension 0, here of " +
                             std::to_string(sizes[0]) + ", into " + std::to_string(parts) +
                             " equal parts: pad x to a multiple of that");
  }
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape[0] = shape[0] / parts * times;
  return shape;
}

/// `expected` is what the caller was compiled for.
inline void check_world_size(const cpu::Group& group, std::optional<int64_t> expected, const char* op) {
  if (!expected || *expected == group.world_size()) return;
  throw std::runtime_error(std::string("gpusync: ") + op + " expects a group of " +
                           std::to_string(*expected) + " ranks, and '" + group.config().name + "' has " +
                           std::to_string(group.world_size()) +
                           ": was it made anew under the same name after this function was compiled?");
}

inline void check_reducible(const cpu::Payload& payload, ReduceOp op, const char* name) {
  if (op == ReduceOp::kAvg && (payload.dtype == DType::kInt32 || payload.dtype == DType::kInt64)) {
    throw std::runtime_error(std::string("gpusync: ") + name +
                             " has no 'avg' for integers: use 'sum' and divide");
  }
  if (payload.dtype == DType::kOther) {
    throw std::runtime_error(std::string("gpusync: ") + name +
                             " takes float32, float64, float16, bfloat16, int32 and int64: convert x");
  }
}

}  // namespace gpusync

// The CUDA kernels of the ops: tensors to pointers, the current stream, and the checks that need torch. The
// work is in cuda/. Compiled only where nvcc is; loads into a CPU-only torch all the same, hence the weak
// symbol.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "cuda/check.h"
#include "cuda/group.h"
#include "cuda/kernels.h"
#include "cuda/launches.h"
#include "registry.h"
#include "tensor_args.h"

// From torch/csrc/inductor/aoti_torch/c/shim.h; only a CUDA torch has it. Can go once torch 2.13, whose
// torch::stable::Stream has a native handle, is the oldest that is served.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                            void** stream);

namespace gpusync {
namespace {

/// Everything between an op's arguments and its launch.
class Call {
 public:
  Call(const Tensor& token, const std::string& group_name)
      : m_host(find_group(group_name)), m_group(cuda::of(*m_host)), m_guard(m_group.device()) {
    if (token.get_device_index() != m_group.device()) {
      throw std::runtime_error(
          "gpusync: group '" + group_name + "' is on cuda:" + std::to_string(m_group.device()) +
          " but the token is on cuda:" + std::to_string(token.get_device_index()) + ": pass sync.token");
    }
    m_launch.token = token_address(token.get());
    if (aoti_torch_get_current_cuda_stream == nullptr) {
      throw std::runtime_error("gpusync: this torch was built without CUDA");
    }
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(m_group.device(), &stream) != 0) {
      throw std::runtime_error("gpusync: torch has no current CUDA stream");
    }
    m_launch.stream = static_cast<cudaStream_t>(stream);
  }

  void check_device(const Tensor& x, const char* op) const {
    if (x.is_cuda() && x.get_device_index() == m_group.device()) return;
    throw std::runtime_error(std::string("gpusync: ") + op + " on a group on cuda:" +
                             std::to_string(m_group.device()) + " needs a tensor on that device");
  }

  cpu::Group& host() const { return *m_host; }
  cuda::Group& group() const { return m_group; }
  const cuda::Launch& launch() const { return m_launch; }

 private:
  std::shared_ptr<cpu::Group> m_host;
  cuda::Group& m_group;
  cuda::DeviceGuard m_guard;
  cuda::Launch m_launch{};
};

void barrier(Tensor token, std::string group_name, int64_t channel, bool fence) {
  const Call call(token, group_name);
  call.group().barrier(call.launch(), channel, fence);
}

void signal(Tensor token, std::string group_name, int64_t dst, int64_t channel) {
  const Call call(token, group_name);
  call.group().signal(call.launch(), dst, channel);
}

void wait_signal(Tensor token, std::string group_name, int64_t src, int64_t channel) {
  const Call call(token, group_name);
  call.group().wait_signal(call.launch(), src, channel);
}

void pull_start(Tensor token, std::string group_name, int64_t channel) {
  const Call call(token, group_name);
  call.group().pull_start(call.launch(), channel);
}

void pull_end(Tensor token, std::string group_name, int64_t channel, bool fence) {
  const Call call(token, group_name);
  call.group().pull_end(call.launch(), channel, fence);
}

Tensor push_epoch(Tensor token, std::string group_name, int64_t channel) {
  const Call call(token, group_name);
  Tensor result = torch::stable::new_empty(token, {}, ScalarType::Int);
  call.group().push_epoch(call.launch(), channel, static_cast<int32_t*>(result.mutable_data_ptr()));
  return result;
}

void push_exit(Tensor token, std::string group_name, int64_t channel) {
  const Call call(token, group_name);
  call.group().push_exit(call.launch(), channel);
}

cuda::Offset device_offset(const Call& call, const Tensor& offset) {
  call.check_device(offset, "an offset tensor");
  if (offset.numel() != 1 || offset.scalar_type() != ScalarType::Long) {
    throw std::runtime_error("gpusync: an offset tensor must hold one int64");
  }
  return {0, static_cast<const int64_t*>(offset.const_data_ptr())};
}

void put_at(const Call& call, const std::string& buffer_name, const Tensor& x, int64_t rank,
            cuda::Offset offset) {
  call.check_device(x, "put");
  const cpu::Buffer& buffer = call.host().buffer(buffer_name);
  check_dtype_of_put(buffer, x);
  cpu::check_fits(buffer, offset.value, static_cast<uint64_t>(x.numel()), "put");
  const Tensor source = packed(x);
  call.group().put(call.launch(), buffer, rank, offset, source.const_data_ptr(), payload_of(source));
}

Tensor get_at(const Call& call, const Tensor& token, const std::string& buffer_name, int64_t rank,
              const std::optional<std::vector<int64_t>>& size, cuda::Offset offset,
              std::optional<ScalarType> dtype) {
  const cpu::Buffer& buffer = call.host().buffer(buffer_name);
  const std::vector<int64_t>& shape = shape_of_get(buffer, size);
  cpu::check_fits(buffer, offset.value, numel_of(shape), "get");  // before memory is asked for
  Tensor result = torch::stable::new_empty(token, shape, dtype_of_get(buffer, dtype));
  call.group().get(call.launch(), buffer, rank, offset, result.mutable_data_ptr(), payload_of(result));
  return result;
}

void put(Tensor token, std::string group_name, std::string buffer_name, Tensor x, int64_t rank,
         int64_t offset) {
  put_at(Call(token, group_name), buffer_name, x, rank, {offset, nullptr});
}

void put_tensor_offset(Tensor token, std::string group_name, std::string buffer_name, Tensor x, int64_t rank,
                       Tensor offset) {
  const Call call(token, group_name);
  put_at(call, buffer_name, x, rank, device_offset(call, offset));
}

Tensor get(Tensor token, std::string group_name, std::string buffer_name, int64_t rank,
           std::optional<std::vector<int64_t>> size, int64_t offset, std::optional<ScalarType> dtype) {
  return get_at(Call(token, group_name), token, buffer_name, rank, size, {offset, nullptr}, dtype);
}

Tensor get_tensor_offset(Tensor token, std::string group_name, std::string buffer_name, int64_t rank,
                         std::optional<std::vector<int64_t>> size, Tensor offset,
                         std::optional<ScalarType> dtype) {
  const Call call(token, group_name);
  return get_at(call, token, buffer_name, rank, size, device_offset(call, offset), dtype);
}

Tensor all_reduce(Tensor token, std::string group_name, Tensor x, std::string reduce_op, std::string algo) {
  const ReduceOp op = to_reduce_op(reduce_op);
  const Algo chosen = to_algo(algo);
  const cpu::Payload payload = payload_of(x);
  check_reducible(payload, op, "all_reduce");
  const Call call(token, group_name);
  call.check_device(x, "all_reduce");
  const Tensor input = packed(x);
  Tensor output = empty_packed(x);
  call.group().all_reduce(call.launch(), input.const_data_ptr(), output.mutable_data_ptr(), payload, op,
                          chosen);
  return output;
}

/// Of what fits (rms_norm.py). The caller has looked at shapes, dtypes and devices.
std::tuple<Tensor, Tensor> push_rms_norm(Tensor token, std::string group_name, Tensor x, Tensor residual,
                                         Tensor weight, double eps, double weight_bias) {
  const Call call(token, group_name);
  const cpu::Payload payload = payload_of(x);
  const auto columns = static_cast<uint64_t>(weight.numel());
  const uint64_t bytes = payload.numel * x.element_size();
  if (columns == 0 || columns * x.element_size() % 8 != 0 || payload.numel % columns != 0 || bytes == 0 ||
      bytes > call.group().pushed_bytes(payload.dtype) || residual.numel() != x.numel() ||
      residual.scalar_type() != x.scalar_type() || weight.scalar_type() != x.scalar_type()) {
    throw std::runtime_error("gpusync: _push_rms_norm does not take that: call all_reduce_rms_norm");
  }
  for (const Tensor* tensor : {&x, &residual, &weight}) call.check_device(*tensor, "all_reduce_rms_norm");
  const Tensor summand = packed(x);
  const Tensor before = packed(residual);
  const Tensor by = packed(weight);
  Tensor norm = empty_packed(x);
  Tensor total = empty_packed(x);
  call.group().rms_norm(call.launch(),
                        {before.const_data_ptr(), by.const_data_ptr(), norm.mutable_data_ptr(), columns,
                         static_cast<float>(eps), static_cast<float>(weight_bias)},
                        summand.const_data_ptr(), total.mutable_data_ptr(), payload);
  return {norm, total};
}

int64_t cuda_pushed_bytes(std::string group_name, ScalarType dtype) {
  return static_cast<int64_t>(cuda::of(*find_group(group_name)).pushed_bytes(to_dtype(dtype)));
}

uint64_t poison_of(ScalarType type) {
  switch (type) {
    case ScalarType::Bool: return 0x0101010101010101u;
    case ScalarType::Char: return 0x7f7f7f7f7f7f7f7fu;
    case ScalarType::Short: return 0x7fff7fff7fff7fffu;
    default: return cuda::poison_of(to_dtype(type));
  }
}

/// all_gather, broadcast, all_to_all and reduce_scatter. `result`: the output's shape.
Tensor exchange(const Call& call, const Tensor& x, cpu::Exchange what, const std::vector<int64_t>& result) {
  const Tensor output = torch::stable::new_empty(x, result);
  const Tensor input = packed(x);
  call.group().exchange(call.launch(), what, input.const_data_ptr(), output.mutable_data_ptr(), payload_of(x),
                        poison_of(x.scalar_type()));
  return output;
}

Tensor all_gather(Tensor token, std::string group_name, Tensor x, std::optional<int64_t> world_size) {
  const Call call(token, group_name);
  call.check_device(x, "all_gather");
  check_world_size(call.host(), world_size, "all_gather");
  return exchange(call, x, {Op::kAllGather, x.element_size(), static_cast<int32_t>(x.scalar_type())},
                  shape_of_exchange(x, "all_gather", call.host().world_size(), 1));
}

Tensor reduce_scatter(Tensor token, std::string group_name, Tensor x, std::string reduce_op,
                      std::optional<int64_t> world_size) {
  const ReduceOp op = to_reduce_op(reduce_op);
  check_reducible(payload_of(x), op, "reduce_scatter");
  const Call call(token, group_name);
  call.check_device(x, "reduce_scatter");
  check_world_size(call.host(), world_size, "reduce_scatter");
  return exchange(call, x, {Op::kReduceScatter, x.element_size(), static_cast<int32_t>(x.scalar_type()), op},
                  shape_of_exchange(x, "reduce_scatter", 1, call.host().world_size()));
}

Tensor broadcast(Tensor token, std::string group_name, Tensor x, int64_t src) {
  const Call call(token, group_name);
  call.check_device(x, "broadcast");
  const auto sizes = x.sizes();
  return exchange(
      call, x, {Op::kBroadcast, x.element_size(), static_cast<int32_t>(x.scalar_type()), ReduceOp::kSum, src},
      {sizes.begin(), sizes.end()});
}

Tensor reduce(Tensor token, std::string group_name, Tensor x, int64_t dst, std::string reduce_op) {
  const ReduceOp op = to_reduce_op(reduce_op);
  check_reducible(payload_of(x), op, "reduce");
  const Call call(token, group_name);
  call.check_device(x, "reduce");
  const auto sizes = x.sizes();
  return exchange(call, x, {Op::kReduce, x.element_size(), static_cast<int32_t>(x.scalar_type()), op, dst},
                  {sizes.begin(), sizes.end()});
}

Tensor all_to_all(Tensor token, std::string group_name, Tensor x) {
  const Call call(token, group_name);
  call.check_device(x, "all_to_all");
  return exchange(call, x, {Op::kAllToAll, x.element_size(), static_cast<int32_t>(x.scalar_type())},
                  shape_of_exchange(x, "all_to_all", call.host().world_size(), call.host().world_size()));
}

Tensor cuda_ping_pong(Tensor token, std::string group_name, int64_t peer, int64_t first, int64_t rounds,
                      bool fence) {
  const Call call(token, group_name);
  Tensor result = torch::stable::new_empty(token, {1}, ScalarType::Long);
  call.group().ping_pong(call.launch(), peer, first, rounds, fence,
                         static_cast<int64_t*>(result.mutable_data_ptr()));
  return result;
}

int64_t cuda_pad_bytes(int64_t channels, int64_t staging_bytes) {
  return static_cast<int64_t>(
      cuda::PadLayout(static_cast<uint32_t>(channels), static_cast<size_t>(staging_bytes)).total_bytes());
}

void cuda_open(Tensor pad, Tensor token, std::string group_name, std::vector<int64_t> pads,
               int64_t staging_bytes, int64_t max_blocks, bool clusters) {
  const auto host = find_group(group_name);
  host->set_device_part(std::make_shared<cuda::Group>(
      *host,
      cuda::DeviceConfig{pad.get_device_index(), std::move(pads), static_cast<size_t>(staging_bytes),
                         static_cast<uint32_t>(max_blocks), clusters},
      cuda::KeptMemory::Parts{std::make_shared<Tensor>(pad), std::make_shared<Tensor>(token)}));
}

void cuda_buffer(Tensor memory, std::string group_name, std::string buffer_name, std::vector<int64_t> shape,
                 ScalarType dtype, std::vector<int64_t> parts) {
  const auto host = find_group(group_name);
  uint64_t numel = 1;
  for (const int64_t extent : shape) numel *= static_cast<uint64_t>(extent);
  const size_t item = torch::stable::new_empty(memory, {}, dtype).element_size();
  host->add_buffer({buffer_name, std::move(shape), to_dtype(dtype), static_cast<int64_t>(dtype), item, numel,
                    nullptr, 0, nullptr});
  cuda::of(*host).add_buffer(buffer_name,
                             {std::move(parts), poison_of(dtype), std::make_shared<Tensor>(memory)});
}

/// Rows of five: max_bytes, algo (as in fingerprint.h), blocks, threads, mask of dtypes.
void cuda_tune(std::string group_name, std::vector<int64_t> numbers) {
  std::vector<cuda::Group::TuningRow> rows;
  for (size_t i = 0; i + 4 < numbers.size(); i += 5) {
    rows.push_back({static_cast<uint64_t>(numbers[i]), static_cast<Algo>(numbers[i + 1]),
                    static_cast<uint32_t>(numbers[i + 2]), static_cast<uint32_t>(numbers[i + 3]),
                    static_cast<uint32_t>(numbers[i + 4])});
  }
  cuda::of(*find_group(group_name)).set_tuning(std::move(rows));
}

std::vector<int64_t> cuda_probe(std::string group_name, int64_t phase) {
  return cuda::of(*find_group(group_name)).probe(static_cast<int>(phase));
}

/// The handle's 8-byte words.
std::vector<int64_t> cuda_handle(std::string group_name, int64_t channel) {
  const DeviceHandle handle = cuda::of(*find_group(group_name)).handle(channel);
  std::vector<int64_t> words(sizeof handle / sizeof(int64_t));
  static_assert(sizeof handle % sizeof words[0] == 0);
  std::memcpy(words.data(), &handle, sizeof handle);
  return words;
}

std::vector<int64_t> cuda_parts(std::string group_name, std::string buffer_name) {
  const auto host = find_group(group_name);
  return cuda::of(*host).parts(host->buffer(buffer_name));
}

void cuda_rebase(std::string group_name) { cuda::of(*find_group(group_name)).rebase(); }

void cuda_break(std::string group_name) { cuda::of(*find_group(group_name)).break_again(); }

void cuda_preset(std::string group_name, int64_t epoch) {
  cuda::of(*find_group(group_name)).preset(static_cast<uint32_t>(epoch));
}

}  // namespace
}  // namespace gpusync

STABLE_TORCH_LIBRARY_IMPL(gpusync, CUDA, m) {
  m.impl("barrier", TORCH_BOX(&gpusync::barrier));
  m.impl("signal", TORCH_BOX(&gpusync::signal));
  m.impl("wait_signal", TORCH_BOX(&gpusync::wait_signal));
  m.impl("pull_start", TORCH_BOX(&gpusync::pull_start));
  m.impl("pull_end", TORCH_BOX(&gpusync::pull_end));
  m.impl("push_epoch", TORCH_BOX(&gpusync::push_epoch));
  m.impl("push_exit", TORCH_BOX(&gpusync::push_exit));
  m.impl("put", TORCH_BOX(&gpusync::put));
  m.impl("put.tensor_offset", TORCH_BOX(&gpusync::put_tensor_offset));
  m.impl("get", TORCH_BOX(&gpusync::get));
  m.impl("get.tensor_offset", TORCH_BOX(&gpusync::get_tensor_offset));
  m.impl("all_reduce", TORCH_BOX(&gpusync::all_reduce));
  m.impl("_all_reduce", TORCH_BOX(&gpusync::all_reduce));
  m.impl("_push_rms_norm", TORCH_BOX(&gpusync::push_rms_norm));
  m.impl("all_gather", TORCH_BOX(&gpusync::all_gather));
  m.impl("reduce_scatter", TORCH_BOX(&gpusync::reduce_scatter));
  m.impl("broadcast", TORCH_BOX(&gpusync::broadcast));
  m.impl("reduce", TORCH_BOX(&gpusync::reduce));
  m.impl("all_to_all", TORCH_BOX(&gpusync::all_to_all));
  m.impl("_cuda_open", TORCH_BOX(&gpusync::cuda_open));
  m.impl("_cuda_buffer", TORCH_BOX(&gpusync::cuda_buffer));
  m.impl("_cuda_ping_pong", TORCH_BOX(&gpusync::cuda_ping_pong));
}

STABLE_TORCH_LIBRARY_IMPL(gpusync, CompositeExplicitAutograd, m) {
  m.impl("_cuda_pad_bytes", TORCH_BOX(&gpusync::cuda_pad_bytes));
  m.impl("_cuda_pushed_bytes", TORCH_BOX(&gpusync::cuda_pushed_bytes));
  m.impl("_cuda_tune", TORCH_BOX(&gpusync::cuda_tune));
  m.impl("_cuda_probe", TORCH_BOX(&gpusync::cuda_probe));
  m.impl("_cuda_handle", TORCH_BOX(&gpusync::cuda_handle));
  m.impl("_cuda_parts", TORCH_BOX(&gpusync::cuda_parts));
  m.impl("_cuda_rebase", TORCH_BOX(&gpusync::cuda_rebase));
  m.impl("_cuda_break", TORCH_BOX(&gpusync::cuda_break));
  m.impl("_cuda_preset", TORCH_BOX(&gpusync::cuda_preset));
}

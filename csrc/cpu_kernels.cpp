// The CPU kernels of the ops: tensors to pointers, and the checks that need torch. The work is in cpu/.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "light_boxing.h"
#include "registry.h"
#include "tensor_args.h"

namespace gpusync {
namespace {

std::shared_ptr<cpu::Group> enter(const Tensor& token, const std::string& group_name) {
  auto group = find_cpu_group(group_name);
  touch(token_address(token.get()));
  return group;
}

void check_on_cpu(const Tensor& x, const char* op) {
  if (!x.is_cpu()) {
    throw std::runtime_error(std::string("gpusync: ") + op +
                             " on a CPU group needs a CPU tensor: move it with .cpu()");
  }
}

Tensor push_epoch(const Tensor& token, const std::string& group_name, int64_t channel) {
  const auto epoch = static_cast<int32_t>(enter(token, group_name)->push_epoch(channel));
  Tensor result = torch::stable::new_empty(token, {}, ScalarType::Int);
  *static_cast<int32_t*>(result.mutable_data_ptr()) = epoch;
  return result;
}

void put(const Tensor& token, const std::string& group_name, const std::string& buffer_name, const Tensor& x,
         int64_t rank, int64_t offset) {
  check_on_cpu(x, "put");
  const auto group = enter(token, group_name);
  const cpu::Buffer& buffer = group->buffer(buffer_name);
  check_dtype_of_put(buffer, x);
  const Tensor source = packed(x);
  group->put(buffer, rank, offset, source.const_data_ptr(), payload_of(source));
}

Tensor get(const Tensor& token, const std::string& group_name, const std::string& buffer_name, int64_t rank,
           const std::optional<std::vector<int64_t>>& size, int64_t offset, std::optional<ScalarType> dtype) {
  const auto group = enter(token, group_name);
  const cpu::Buffer& buffer = group->buffer(buffer_name);
  const std::vector<int64_t>& shape = shape_of_get(buffer, size);
  cpu::check_fits(buffer, offset, numel_of(shape), "get");  // before memory is asked for
  Tensor result = torch::stable::new_empty(token, shape, dtype_of_get(buffer, dtype));
  group->get(buffer, rank, offset, result.mutable_data_ptr(), payload_of(result));
  return result;
}

int64_t read_offset(const Tensor& offset) {
  check_on_cpu(offset, "an offset tensor");
  if (offset.numel() != 1 || offset.scalar_type() != ScalarType::Long) {
    throw std::runtime_error("gpusync: an offset tensor must hold one int64");
  }
  return *static_cast<const int64_t*>(offset.const_data_ptr());
}

void put_tensor_offset(const Tensor& token, const std::string& group_name, const std::string& buffer_name,
                       const Tensor& x, int64_t rank, const Tensor& offset) {
  put(token, group_name, buffer_name, x, rank, read_offset(offset));
}

Tensor get_tensor_offset(const Tensor& token, const std::string& group_name, const std::string& buffer_name,
                         int64_t rank, const std::optional<std::vector<int64_t>>& size, const Tensor& offset,
                         std::optional<ScalarType> dtype) {
  return get(token, group_name, buffer_name, rank, size, read_offset(offset), dtype);
}

/// Boxed by hand for the same reasons as in light_boxing.h.
void all_reduce(StableIValue* stack, uint64_t n_arguments, uint64_t n_results) {
  check_stack(n_arguments == 5 && n_results == 1);
  const StackTensor token(stack[0]);
  const StackString group_name(stack[1]);
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[2]));
  const StackString reduce_op(stack[3]);
  const StackString algo(stack[4]);
  check_on_cpu(x, "all_reduce");
  const ReduceOp op = to_reduce_op(reduce_op.view());
  const Algo chosen = to_algo(algo.view());
  const cpu::Payload payload = payload_of(x);
  check_reducible(payload, op, "all_reduce");
  const auto group = find_cpu_group(group_name.view());
  touch(token_address(token.get()));
  const Tensor input = packed(x);
  const Tensor output = empty_packed(x);
  group->all_reduce(input.const_data_ptr(), output.mutable_data_ptr(), payload, op, chosen);
  stack[0] = torch::stable::detail::from(output);
}

/// all_gather, broadcast, all_to_all and reduce_scatter. `result`: the output's shape.
Tensor exchange(const Tensor& token, cpu::Group& group, const Tensor& x, cpu::Exchange what,
                const std::vector<int64_t>& result) {
  const Tensor output = torch::stable::new_empty(x, result);
  touch(token_address(token.get()));
  const Tensor input = packed(x);
  group.exchange(what, input.const_data_ptr(), output.mutable_data_ptr(), payload_of(x));
  return output;
}

Tensor all_gather(const Tensor& token, const std::string& group_name, const Tensor& x,
                  std::optional<int64_t> world_size) {
  check_on_cpu(x, "all_gather");
  const auto group = find_cpu_group(group_name);
  check_world_size(*group, world_size, "all_gather");
  return exchange(token, *group, x, {Op::kAllGather, x.element_size(), static_cast<int32_t>(x.scalar_type())},
                  shape_of_exchange(x, "all_gather", group->world_size(), 1));
}

Tensor reduce_scatter(const Tensor& token, const std::string& group_name, const Tensor& x,
                      const std::string& reduce_op, std::optional<int64_t> world_size) {
  check_on_cpu(x, "reduce_scatter");
  const ReduceOp op = to_reduce_op(reduce_op);
  check_reducible(payload_of(x), op, "reduce_scatter");
  const auto group = find_cpu_group(group_name);
  check_world_size(*group, world_size, "reduce_scatter");
  return exchange(token, *group, x,
                  {Op::kReduceScatter, x.element_size(), static_cast<int32_t>(x.scalar_type()), op},
                  shape_of_exchange(x, "reduce_scatter", 1, group->world_size()));
}

Tensor broadcast(const Tensor& token, const std::string& group_name, const Tensor& x, int64_t src) {
  check_on_cpu(x, "broadcast");
  const auto sizes = x.sizes();
  return exchange(
      token, *find_cpu_group(group_name), x,
      {Op::kBroadcast, x.element_size(), static_cast<int32_t>(x.scalar_type()), ReduceOp::kSum, src},
      {sizes.begin(), sizes.end()});
}

Tensor reduce(const Tensor& token, const std::string& group_name, const Tensor& x, int64_t dst,
              const std::string& reduce_op) {
  check_on_cpu(x, "reduce");
  const ReduceOp op = to_reduce_op(reduce_op);
  check_reducible(payload_of(x), op, "reduce");
  const auto sizes = x.sizes();
  return exchange(token, *find_cpu_group(group_name), x,
                  {Op::kReduce, x.element_size(), static_cast<int32_t>(x.scalar_type()), op, dst},
                  {sizes.begin(), sizes.end()});
}

Tensor all_to_all(const Tensor& token, const std::string& group_name, const Tensor& x) {
  check_on_cpu(x, "all_to_all");
  const auto group = find_cpu_group(group_name);
  return exchange(token, *group, x, {Op::kAllToAll, x.element_size(), static_cast<int32_t>(x.scalar_type())},
                  shape_of_exchange(x, "all_to_all", group->world_size(), group->world_size()));
}

int64_t cpu_bytes(int64_t world_size, int64_t channels, int64_t staging_bytes) {
  return static_cast<int64_t>(cpu::Layout(static_cast<uint32_t>(world_size), static_cast<uint32_t>(channels),
                                          static_cast<size_t>(staging_bytes))
                                  .total_bytes());
}

void cpu_open(Tensor memory, std::string group_name, int64_t rank, int64_t world_size, int64_t channels,
              int64_t staging_bytes, double timeout, int64_t global_rank, std::string host,
              bool pids_visible) {
  if (memory.numel() < cpu_bytes(world_size, channels, staging_bytes)) {
    throw std::runtime_error("gpusync: the shared memory of group '" + group_name + "' is too small");
  }
  cpu::GroupConfig config{group_name,
                          static_cast<uint32_t>(rank),
                          static_cast<uint32_t>(world_size),
                          static_cast<uint32_t>(channels),
                          static_cast<size_t>(staging_bytes),
                          timeout,
                          static_cast<int32_t>(global_rank),
                          host,
                          pids_visible};
  void* address = memory.mutable_data_ptr();
  add_group(group_name,
            std::make_shared<cpu::Group>(std::move(config), address, std::make_shared<Tensor>(memory)));
}

void cpu_buffer(Tensor memory, std::string group_name, std::string buffer_name, std::vector<int64_t> shape,
                ScalarType dtype, int64_t stride) {
  const auto group = find_group(group_name);
  uint64_t numel = 1;
  for (const int64_t extent : shape) numel *= static_cast<uint64_t>(extent);
  const size_t item = torch::stable::new_empty(memory, {}, dtype).element_size();
  if (numel * item > static_cast<uint64_t>(stride) || memory.numel() < stride * group->world_size()) {
    throw std::runtime_error("gpusync: the shared memory of buffer '" + buffer_name + "' is too small");
  }
  group->add_buffer({buffer_name, std::move(shape), to_dtype(dtype), static_cast<int64_t>(dtype), item, numel,
                     static_cast<char*>(memory.mutable_data_ptr()), static_cast<size_t>(stride),
                     std::make_shared<Tensor>(memory)});
}

void close_group(std::string group_name) { remove_group(group_name); }

void set_timeout(std::string group_name, double seconds) { find_group(group_name)->set_timeout(seconds); }

/// ([], []) while the group is whole, else ([reason, rank, channel, waited_us, missing ranks...], [text, op,
/// what each rank called last...]).
std::tuple<std::vector<int64_t>, std::vector<std::string>> failure(std::string group_name) {
  const auto group = find_group(group_name);
  const cpu::FailureRecord* record = group->failure();
  if (record == nullptr) return {};
  std::vector<int64_t> numbers{static_cast<int64_t>(record->reason), record->rank, record->call.channel,
                               static_cast<int64_t>(record->waited_us)};
  std::vector<std::string> texts{record->text, cpu::name(record->call.op)};
  for (uint32_t r = 0; r < group->world_size(); ++r) {
    if ((record->missing >> r & 1) != 0) numbers.push_back(r);
    texts.push_back(cpu::describe(record->calls[r]));
  }
  return {numbers, texts};
}

bool is_idle(std::string group_name) { return find_group(group_name)->is_idle(); }

void rebase(std::string group_name) { find_group(group_name)->rebase(); }

void revive(std::string group_name) { find_group(group_name)->revive(); }

/// The ranks that have closed the group or whose process is gone.
std::vector<int64_t> gone(std::string group_name) {
  const auto group = find_group(group_name);
  const uint64_t mask = group->gone_among(group->all_ranks());
  std::vector<int64_t> ranks;
  for (uint32_t r = 0; r < group->world_size(); ++r) {
    if ((mask >> r & 1) != 0) ranks.push_back(r);
  }
  return ranks;
}

std::string dump(std::string group_name) { return find_group(group_name)->dump(); }

int64_t calls(std::string group_name) { return find_group(group_name)->calls(); }

#if !defined(GPUSYNC_CUDA_ARCHITECTURES)
#define GPUSYNC_CUDA_ARCHITECTURES ""
#endif
std::string cuda_architectures() { return GPUSYNC_CUDA_ARCHITECTURES; }

void nothing(Tensor) {}

void preset(std::string group_name, int64_t epoch) {
  find_group(group_name)->preset(static_cast<uint32_t>(epoch));
}

}  // namespace
}  // namespace gpusync

STABLE_TORCH_LIBRARY_IMPL(gpusync, CPU, m) {
  using gpusync::LightBox;
  using gpusync::cpu::Group;
  m.impl("barrier", &LightBox<&Group::barrier>::kernel);
  m.impl("signal", &LightBox<&Group::signal>::kernel);
  m.impl("wait_signal", &LightBox<&Group::wait_signal>::kernel);
  m.impl("pull_start", &LightBox<&Group::pull_start>::kernel);
  m.impl("pull_end", &LightBox<&Group::pull_end>::kernel);
  m.impl("push_epoch", TORCH_BOX(&gpusync::push_epoch));
  m.impl("push_exit", &LightBox<&Group::push_exit>::kernel);
  m.impl("put", TORCH_BOX(&gpusync::put));
  m.impl("put.tensor_offset", TORCH_BOX(&gpusync::put_tensor_offset));
  m.impl("get", TORCH_BOX(&gpusync::get));
  m.impl("get.tensor_offset", TORCH_BOX(&gpusync::get_tensor_offset));
  m.impl("all_reduce", &gpusync::all_reduce);
  m.impl("_all_reduce", &gpusync::all_reduce);
  m.impl("all_gather", TORCH_BOX(&gpusync::all_gather));
  m.impl("reduce_scatter", TORCH_BOX(&gpusync::reduce_scatter));
  m.impl("broadcast", TORCH_BOX(&gpusync::broadcast));
  m.impl("reduce", TORCH_BOX(&gpusync::reduce));
  m.impl("all_to_all", TORCH_BOX(&gpusync::all_to_all));
  m.impl("_cpu_open", TORCH_BOX(&gpusync::cpu_open));
  m.impl("_cpu_buffer", TORCH_BOX(&gpusync::cpu_buffer));
  m.impl("_nothing", TORCH_BOX(&gpusync::nothing));
}

STABLE_TORCH_LIBRARY_IMPL(gpusync, CompositeExplicitAutograd, m) {
  m.impl("_cpu_bytes", TORCH_BOX(&gpusync::cpu_bytes));
  m.impl("_close", TORCH_BOX(&gpusync::close_group));
  m.impl("_is_idle", TORCH_BOX(&gpusync::is_idle));
  m.impl("_rebase", TORCH_BOX(&gpusync::rebase));
  m.impl("_revive", TORCH_BOX(&gpusync::revive));
  m.impl("_gone", TORCH_BOX(&gpusync::gone));
  m.impl("_set_timeout", TORCH_BOX(&gpusync::set_timeout));
  m.impl("_failure", TORCH_BOX(&gpusync::failure));
  m.impl("_dump", TORCH_BOX(&gpusync::dump));
  m.impl("_calls", TORCH_BOX(&gpusync::calls));
  m.impl("_cuda_architectures", TORCH_BOX(&gpusync::cuda_architectures));
  m.impl("_preset", TORCH_BOX(&gpusync::preset));
}

// Every schema of the library, and nothing else. Kernels are registered beside their backend
// (cpu_kernels.cpp), fake implementations and gradients in torch_gpusync/ops.py.
//
// Each op mutates the process's ordering token, `Tensor(a!) token`: the chain of these mutations is what
// keeps all ops of all groups in program order under every compiler pass (docs/ordering.md). The group is
// found by its name.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(gpusync, m) {
  m.def("barrier(Tensor(a!) token, str group_name, int channel=0, bool fence=True) -> ()");
  m.def("signal(Tensor(a!) token, str group_name, int dst, int channel=0) -> ()");
  m.def("wait_signal(Tensor(a!) token, str group_name, int src, int channel=0) -> ()");
  m.def("pull_start(Tensor(a!) token, str group_name, int channel=0) -> ()");
  m.def("pull_end(Tensor(a!) token, str group_name, int channel=0, bool fence=False) -> ()");
  m.def("push_epoch(Tensor(a!) token, str group_name, int channel=0) -> Tensor");
  m.def("push_exit(Tensor(a!) token, str group_name, int channel=0) -> ()");
  m.def("put(Tensor(a!) token, str group_name, str buffer, Tensor x, int rank=-1, SymInt offset=0) -> ()");
  m.def(
      "get(Tensor(a!) token, str group_name, str buffer, int rank=-1, SymInt[]? size=None, SymInt offset=0, "
      "ScalarType? dtype=None) -> Tensor");
  // The same with the offset in a device tensor (one int64), which may change between the replays of a graph.
  m.def(
      "put.tensor_offset(Tensor(a!) token, str group_name, str buffer, Tensor x, int rank, Tensor offset) -> "
      "()");
  m.def(
      "get.tensor_offset(Tensor(a!) token, str group_name, str buffer, int rank, SymInt[]? size, Tensor "
      "offset, "
      "ScalarType? dtype=None) -> Tensor");
  // world_size: what a compiler takes for the group's; another one is refused when it runs.
  m.def("all_gather(Tensor(a!) token, str group_name, Tensor x, int? world_size=None) -> Tensor");
  m.def(
      "reduce_scatter(Tensor(a!) token, str group_name, Tensor x, str reduce_op=\"sum\", int? "
      "world_size=None) -> Tensor");
  m.def("broadcast(Tensor(a!) token, str group_name, Tensor x, int src) -> Tensor");
  m.def("reduce(Tensor(a!) token, str group_name, Tensor x, int dst, str reduce_op=\"sum\") -> Tensor");
  m.def("all_to_all(Tensor(a!) token, str group_name, Tensor x) -> Tensor");
  m.def(
      "all_reduce(Tensor(a!) token, str group_name, Tensor x, str reduce_op=\"sum\", str algo=\"auto\") -> "
      "Tensor");
  // -> (norm_out, residual_out). Its kernels choose, in torch_gpusync/rms_norm.py.
  m.def(
      "all_reduce_rms_norm(Tensor(a!) token, str group_name, Tensor x, Tensor residual, Tensor weight, float "
      "eps, float weight_bias=0.0) -> (Tensor, Tensor)");

  // Set-up, called by the Python classes only.
  m.def("_cpu_bytes(int world_size, int channels, int staging_bytes) -> int");
  m.def(
      "_cpu_open(Tensor memory, str group_name, int rank, int world_size, int channels, int staging_bytes, "
      "float timeout, int global_rank, str host, bool pids_visible) -> ()");
  m.def(
      "_cpu_buffer(Tensor memory, str group_name, str buffer, int[] shape, ScalarType dtype, int stride) -> "
      "()");
  m.def("_cuda_pad_bytes(int channels, int staging_bytes) -> int");
  m.def(
      "_cuda_open(Tensor pad, Tensor token, str group_name, int[] pads, int staging_bytes, int max_blocks, "
      "bool clusters) -> ()");
  m.def(
      "_cuda_buffer(Tensor memory, str group_name, str buffer, int[] shape, ScalarType dtype, int[] parts) "
      "-> ()");
  m.def("_cuda_probe(str group_name, int phase) -> int[]");
  m.def("_cuda_handle(str group_name, int channel) -> int[]");
  m.def("_cuda_parts(str group_name, str buffer) -> int[]");
  m.def("_cuda_preset(str group_name, int epoch) -> ()");
  m.def("_close(str group_name) -> ()");
  m.def("_cuda_tune(str group_name, int[] rows) -> ()");
  m.def("_is_idle(str group_name) -> bool");
  m.def("_rebase(str group_name) -> ()");
  m.def("_revive(str group_name) -> ()");
  m.def("_cuda_rebase(str group_name) -> ()");
  m.def("_cuda_break(str group_name) -> ()");
  m.def("_gone(str group_name) -> int[]");
  m.def("_set_timeout(str group_name, float seconds) -> ()");
  m.def("_failure(str group_name) -> (int[], str[])");
  m.def("_dump(str group_name) -> str");
  m.def("_calls(str group_name) -> int");
  m.def("_preset(str group_name, int epoch) -> ()");

  // all_reduce for a caller who knows that no gradient is needed: without the detour over Python that
  // autograd takes.
  m.def(
      "_all_reduce(Tensor(a!) token, str group_name, Tensor x, str reduce_op=\"sum\", str algo=\"auto\") -> "
      "Tensor");

  // all_reduce_rms_norm in one kernel, of what fits.
  m.def(
      "_push_rms_norm(Tensor(a!) token, str group_name, Tensor x, Tensor residual, Tensor weight, float eps, "
      "float weight_bias=0.0) -> (Tensor, Tensor)");
  // The largest payload that `auto` pushes, in bytes.
  m.def("_cuda_pushed_bytes(str group_name, ScalarType dtype) -> int");

  // The benchmark's: nanoseconds (one int64) of so many round trips of a word between this rank's pad and the
  // peer's, who calls it too; -1 when the peer stayed away. Numbers from `first` on must be new to both.
  m.def(
      "_cuda_ping_pong(Tensor(a!) token, str group_name, int peer, int first, int rounds, bool fence) -> "
      "Tensor");

  // What the library was compiled for: "80,90,100,100+ptx", or nothing.
  m.def("_cuda_architectures() -> str");

  // Does nothing: what the benchmark takes for the cost of a call itself.
  m.def("_nothing(Tensor(a!) token) -> ()");
}

"""What the ops promise to the compiler: schemas, fakes, aliasing, kernels, and the graph that they make.

The expected texts are expecttest's: EXPECTTEST_ACCEPT=1 rewrites them after a deliberate change.
"""

# ruff: noqa: E501  (the expected texts are as long as the lines they show)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from op_samples import CHANNEL, open_buffer, overload, per_sample, public_ops, samples
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import torch_gpusync
from torch_gpusync.testing import run_ranks

OPS = public_ops()


@pytest.fixture(scope="module")
def sync() -> Iterator[torch_gpusync.SyncGroup]:
    """A world of one in this process: any call returns at once, however often a checker makes it."""
    [group] = torch_gpusync.virtual_ranks(1, name="schema", timeout=20)
    open_buffer(group)
    yield group
    group.close()


def test_schemas() -> None:
    schemas = "\n".join(str(overload(name)._schema) for name in OPS)
    assert_expected_inline(
        schemas,
        """\
gpusync::all_gather(Tensor(a!) token, str group_name, Tensor x, int? world_size=None) -> Tensor
gpusync::all_reduce(Tensor(a!) token, str group_name, Tensor x, str reduce_op="sum", str algo="auto") -> Tensor
gpusync::all_reduce_rms_norm(Tensor(a!) token, str group_name, Tensor x, Tensor residual, Tensor weight, float eps, float weight_bias=0.) -> (Tensor, Tensor)
gpusync::all_to_all(Tensor(a!) token, str group_name, Tensor x) -> Tensor
gpusync::barrier(Tensor(a!) token, str group_name, int channel=0, bool fence=True) -> ()
gpusync::broadcast(Tensor(a!) token, str group_name, Tensor x, int src) -> Tensor
gpusync::copy_to_ranks(Tensor(a!) token, str group_name, Tensor x) -> Tensor
gpusync::get(Tensor(a!) token, str group_name, str buffer, int rank=-1, SymInt[]? size=None, SymInt offset=0, ScalarType? dtype=None) -> Tensor
gpusync::get.tensor_offset(Tensor(a!) token, str group_name, str buffer, int rank, SymInt[]? size, Tensor offset, ScalarType? dtype=None) -> Tensor
gpusync::pull_end(Tensor(a!) token, str group_name, int channel=0, bool fence=False) -> ()
gpusync::pull_start(Tensor(a!) token, str group_name, int channel=0) -> ()
gpusync::push_epoch(Tensor(a!) token, str group_name, int channel=0) -> Tensor
gpusync::push_exit(Tensor(a!) token, str group_name, int channel=0) -> ()
gpusync::put(Tensor(a!) token, str group_name, str buffer, Tensor x, int rank=-1, SymInt offset=0) -> ()
gpusync::put.tensor_offset(Tensor(a!) token, str group_name, str buffer, Tensor x, int rank, Tensor offset) -> ()
gpusync::reduce(Tensor(a!) token, str group_name, Tensor x, int dst, str reduce_op="sum") -> Tensor
gpusync::reduce_from_ranks(Tensor(a!) token, str group_name, Tensor x) -> Tensor
gpusync::reduce_scatter(Tensor(a!) token, str group_name, Tensor x, str reduce_op="sum", int? world_size=None) -> Tensor
gpusync::signal(Tensor(a!) token, str group_name, int dst, int channel=0) -> ()
gpusync::wait_signal(Tensor(a!) token, str group_name, int src, int channel=0) -> ()""",
    )


@pytest.mark.parametrize("name", OPS)
def test_the_token_is_all_that_an_op_mutates(name: str) -> None:
    schema = overload(name)._schema
    token, group_name, *rest = schema.arguments
    assert (token.name, str(token.type), token.alias_info.is_write) == ("token", "Tensor", True)
    assert (group_name.name, str(group_name.type)) == ("group_name", "str")
    assert not any(argument.alias_info for argument in rest), "another argument is mutated or aliased"
    assert not any(result.alias_info for result in schema.returns), "a result aliases an argument"


@pytest.mark.parametrize("name", OPS)
def test_kernels_are_registered(name: str) -> None:
    """The library's registration ignores an unknown dispatch key, so a missing kernel shows only here."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(name, "Meta"), "no fake implementation"
    assert has(name, "Autograd"), "autograd would complain about the mutated token, or give no gradient"
    if has(name, "CompositeExplicitAutograd"):
        return  # made of other ops
    assert has(name, "CPU")
    built_with_cuda = has("gpusync::_cuda_open", "CUDA")
    assert has(name, "CUDA") == built_with_cuda


@pytest.mark.parametrize("name", OPS)
def test_case_26_opcheck(sync: torch_gpusync.SyncGroup, name: str) -> None:
    """Schema against behaviour, autograd registration, fake against real, AOTAutograd with dynamic shapes."""
    for arguments in samples(name, sync):
        _opcheck(name, overload(name), arguments)


def _opcheck(name: str, op: Any, arguments: tuple[Any, ...]) -> None:
    results = torch.library.opcheck(op, arguments)
    assert set(results.values()) == {"SUCCESS"}, (name, results)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _check_against_fake(name: str, op: Any, arguments: tuple[Any, ...]) -> None:
    before = arguments[0].clone()
    real = op(*arguments)
    # The forward pass of copy_to_ranks is local; it takes the token for its gradient.
    if name != "gpusync::copy_to_ranks":
        assert not torch.equal(arguments[0], before), f"the schema of {name} says that it mutates the token"
    with FakeTensorMode() as mode:
        fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, arguments)
        fake = op(*fakes)
    described = [
        [(x.shape, x.dtype, x.stride(), x.device, x.requires_grad) for x in _tensors(results)]
        for results in (real, fake)
    ]
    assert described[0] == described[1], f"{name}: real and fake differ: {described}"
    given = {x.untyped_storage().data_ptr() for x in _tensors(arguments)}
    made = [x.untyped_storage().data_ptr() for x in _tensors(real) if x.numel() > 0]
    assert len(given | {*made}) == len(given) + len(made), f"{name} returns an input, or one tensor twice"
    if name.startswith("gpusync::get") and real.numel() > 0:  # not a window into the buffer, either
        kept = real.clone()
        real.fill_(-1)
        assert torch.equal(op(*arguments), kept), "a result of get aliases the buffer"


def _ranks_opcheck(rank: int) -> None:
    per_sample(torch_gpusync.SyncGroup(timeout=60), _opcheck, most=1)


def _ranks_against_fake(rank: int) -> None:
    per_sample(torch_gpusync.SyncGroup(timeout=60), _check_against_fake)


def test_case_26_opcheck_in_step_on_three_ranks() -> None:
    run_ranks(_ranks_opcheck, 3, timeout=200)


@pytest.mark.parametrize("ranks", [1, 3])  # with one rank, returning the input would be tempting
def test_case_26_real_results_are_as_the_fakes_say_and_alias_nothing(ranks: int) -> None:
    run_ranks(_ranks_against_fake, ranks, timeout=60)


def _lines(graph: torch.fx.GraphModule) -> str:
    """One line per call; shorter than the graph's own text, which differs between versions of torch."""
    lines = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            arguments = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
            lines.append(f"{node.name} = {node.target}({', '.join(arguments)})")
    return "\n".join(lines)


def test_fx_graph(sync: torch_gpusync.SyncGroup) -> None:
    """The graph that Dynamo hands to a back end: one call per op, in program order, on one token."""
    graphs: list[str] = []
    buffer = torch_gpusync.SymmetricBuffer(sync, "samples", torch.Size((4, 6)), torch.float32)

    def exchange(x: Tensor) -> Tensor:
        buffer.put(x.sin())
        sync.barrier(CHANNEL)
        peer = buffer.get()
        sync.barrier(CHANNEL)
        return sync.all_reduce(peer @ x.t())

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(_lines(graph))
        return graph.forward

    x = torch.ones(4, 6)
    torch.testing.assert_close(torch.compile(exchange, backend=keep, fullgraph=True)(x), exchange(x))
    assert_expected_inline(
        graphs.pop(),
        """\
put_default = gpusync.put.default(l_buffer_sync_token, schema/0, samples, sin, -1, 0)
barrier_default = gpusync.barrier.default(l_buffer_sync_token, schema/0, 1, True)
part = gpusync.get.default(l_buffer_sync_token, schema/0, samples, -1, (4, 6), 0, torch.float32)
barrier_default_1 = gpusync.barrier.default(l_buffer_sync_token, schema/0, 1, True)
matmul = <built-in function matmul>(part, t)
all_reduce_default = gpusync.all_reduce.default(l_buffer_sync_token, schema/0, matmul, sum, auto)""",
    )

    def keep_aot(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(_lines(graph))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep_aot)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(exchange, backend=backend, fullgraph=True)(x), exchange(x))
    # After functionalisation: every op takes the token that the one before it returned.
    assert_expected_inline(
        graphs.pop(),
        """\
sin = aten.sin.default(arg0_1)
auto_functionalized_v2 = auto_functionalized_v2(gpusync.put.default, group_name=schema/0, buffer=samples, x=sin, rank=-1, offset=0, _token_base_index=0, _all_bases=[arg1_1])
getitem_1 = <built-in function getitem>(auto_functionalized_v2, 1)
auto_functionalized_v2_1 = auto_functionalized_v2(gpusync.barrier.default, group_name=schema/0, channel=1, fence=True, _token_base_index=0, _all_bases=[getitem_1])
getitem_3 = <built-in function getitem>(auto_functionalized_v2_1, 1)
auto_functionalized_v2_2 = auto_functionalized_v2(gpusync.get.default, group_name=schema/0, buffer=samples, rank=-1, size=[4, 6], offset=0, dtype=torch.float32, _token_base_index=0, _all_bases=[getitem_3])
getitem_4 = <built-in function getitem>(auto_functionalized_v2_2, 0)
getitem_5 = <built-in function getitem>(auto_functionalized_v2_2, 1)
auto_functionalized_v2_3 = auto_functionalized_v2(gpusync.barrier.default, group_name=schema/0, channel=1, fence=True, _token_base_index=0, _all_bases=[getitem_5])
getitem_7 = <built-in function getitem>(auto_functionalized_v2_3, 1)
t = aten.t.default(arg0_1)
mm = aten.mm.default(getitem_4, t)
auto_functionalized_v2_4 = auto_functionalized_v2(gpusync.all_reduce.default, group_name=schema/0, x=mm, reduce_op=sum, algo=auto, _token_base_index=0, _all_bases=[getitem_7])
getitem_8 = <built-in function getitem>(auto_functionalized_v2_4, 0)
getitem_9 = <built-in function getitem>(auto_functionalized_v2_4, 1)""",
    )

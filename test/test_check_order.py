"""check_order passes the shipped design, fails on each wrong one, and says in words what differs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ordering_designs import DESIGNS, N
from ordering_programs import PROGRAMS
from test_ordering import WRONG
from torch import Tensor

import torch_gpusync
from torch_gpusync import SyncGroup
from torch_gpusync.testing import OrderError, check_order, executed_ops, ranks, run_ranks, run_threads


def _check_design(
    rank: int, name: str, backends: list[str], programs: list[str], timeout: float
) -> list[str]:
    """What check_order finds on this rank in programs of three groups, with matrix products between."""
    design = DESIGNS[name](rank, timeout)
    w = 2 * torch.eye(N)
    for program in programs:
        try:
            with torch.no_grad():
                log = check_order(
                    lambda x, run=PROGRAMS[program].run: run(design, x, w),
                    torch.full((N, N), 100.0 + rank),
                    backend=backends,
                    fullgraph=True,
                    namespaces=[f"gpusync_wrong_{name}"],
                    timeout=250,
                )
        except OrderError as error:
            return error.findings
        assert {op.name for op in log} == {"gpusync.put", "gpusync.barrier", "gpusync.get"}
    return []


def test_the_shipped_design_passes() -> None:
    found = run_ranks(
        _check_design, 3, "shipped", ["aot_eager", "inductor"], ["two_groups"], 90.0, timeout=300
    )
    assert found == [[], [], []]


# The cheapest compiler that gets a design wrong; test_ordering.py has them all.
@pytest.mark.parametrize(
    ("design", "backend", "program"), {design: (design, *rest) for design, *rest in reversed(WRONG)}.values()
)
def test_each_wrong_design_is_found(design: str, backend: str, program: str) -> None:
    found = run_ranks(_check_design, 3, design, [backend], [program], 15.0, timeout=300)
    texts = [text for of_rank in found for text in of_rank]
    assert texts and all(text.startswith(f"{backend}: ") for text in texts), texts
    expected = {
        "undeclared": "missing: ",
        "mutable_payload": "which outlives the call, differs when the op begins",
        "effect_token": "in another order",
        "token_per_group": "in another order",
    }[design]
    assert any(expected in text for text in texts), texts
    print(texts[0])


# ---- what it sees, in one process


@pytest.fixture
def one() -> Iterator[SyncGroup]:
    [sync] = torch_gpusync.virtual_ranks(1, timeout=20.0)
    yield sync
    sync.close()


def _exchange(sync: SyncGroup) -> Callable[[Tensor], Tensor]:
    buffer = sync.buffer("b", (4,), torch.float32)

    def exchange(x: Tensor) -> Tensor:
        buffer.put(x * 2)
        sync.barrier()
        y = buffer.get(0)
        sync.barrier(1)
        return y + 1

    return exchange


def _editor(edit: Callable[[torch.fx.Graph, list[torch.fx.Node]], None]) -> Callable[..., Any]:
    """A compiler with a fault: it changes the graph, which it is given with the nodes that are ops of gpusync."""

    def faulty(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        edit(graph.graph, [node for node in graph.graph.nodes if str(node.target).startswith("gpusync.")])
        graph.recompile()
        return graph.forward

    return faulty


def _swap(graph: torch.fx.Graph, ops: list[torch.fx.Node]) -> None:
    ops[0].prepend(ops[1])


def _drop(graph: torch.fx.Graph, ops: list[torch.fx.Node]) -> None:
    graph.erase_node(ops[1])


def _repeat(graph: torch.fx.Graph, ops: list[torch.fx.Node]) -> None:
    with graph.inserting_before(ops[3]):
        graph.node_copy(ops[3])


def _other_channel(graph: torch.fx.Graph, ops: list[torch.fx.Node]) -> None:
    ops[3].args = (*ops[3].args[:2], 2, *ops[3].args[3:])


def _other_data(graph: torch.fx.Graph, ops: list[torch.fx.Node]) -> None:
    product = ops[0].args[3]
    assert isinstance(product, torch.fx.Node)
    ops[0].replace_input_with(product, product.args[0])  # type: ignore[arg-type]


def _other_result(graph: torch.fx.Graph, ops: list[torch.fx.Node]) -> None:
    [result] = ops[2].users
    result.args = (ops[2], 3)


FAULTS: list[tuple[Callable[..., None], list[str]]] = [
    (
        _swap,
        [
            "compiled ran the same 4 ops as eager in another order",
            "op 1: eager ran gpusync.put(x=float32[4], group_name='virtual",
            ", compiled ran gpusync.barrier(",
        ],
    ),
    (_drop, ["eager ran 4 ops, compiled 3", "missing: 1 x gpusync.barrier(", "channel=0, fence=True)"]),
    (_repeat, ["eager ran 4 ops, compiled 5", "added: 1 x gpusync.barrier(", "op 5: eager ran nothing more"]),
    (
        _other_channel,
        ["missing: 1 x", "added: 1 x", "op 4: eager ran", "channel=1, fence", "channel=2, fence"],
    ),
    (
        _other_data,
        [
            "op 1, gpusync.put(x=float32[4], ",
            "it was given other data as x: element [0] is 3.0 instead of 6.0 (4 of 4 are wrong)",
            "op 3, gpusync.get(",
            "it returned other data as result 0: element [0] is 3.0 instead of 6.0",
            "result 0 differs: element [0] is 4.0 instead of 7.0",
        ],
    ),
    (_other_result, ["faulty: result 0 differs: element [0] is 9.0 instead of 7.0"]),
]


@pytest.mark.parametrize(("edit", "texts"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_it_says_what_differs(one: SyncGroup, edit: Callable[..., None], texts: list[str]) -> None:
    with pytest.raises(OrderError) as caught:
        check_order(_exchange(one), torch.full((4,), 3.0), backend=_editor(edit))
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)
    assert all(text.startswith("faulty: ") for text in caught.value.findings)


def test_it_returns_the_ops_and_leaves_the_arguments_as_they_were(one: SyncGroup) -> None:
    x = torch.arange(4.0)
    log = check_order(_exchange(one), x, backend="aot_eager")
    assert [op.name for op in log] == ["gpusync.put", "gpusync.barrier", "gpusync.get", "gpusync.barrier"]
    assert log[3].arguments == {"group_name": one.name, "channel": 1, "fence": True}
    assert log[0].payload["x"].tolist() == log[2].results[0].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_backward_passes_and_gradients_are_part_of_it(one: SyncGroup) -> None:
    x = torch.arange(4.0, requires_grad=True)
    log = check_order(lambda x: one.all_reduce(x.sin()), x, backend="aot_eager")
    assert [op.name for op in log] == ["gpusync.all_reduce"] * 2 and x.grad is None

    def forgets(x: Tensor) -> Tensor:
        y = x.sin()
        return one.all_reduce(y.detach() if torch.compiler.is_compiling() else y) + 0 * y

    with pytest.raises(OrderError, match=r"eager ran 2 ops, compiled 1\n  missing: 1 x gpusync.all_reduce"):
        check_order(forgets, x, backend="aot_eager")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_runs_in_the_callers_mode(one: SyncGroup, mode: Callable[[], Any]) -> None:
    seen: set[tuple[bool, bool]] = set()

    def looks(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return one.all_reduce(x * 2)

    with mode():
        here = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        log = check_order(looks, torch.ones(3, requires_grad=True), backend="aot_eager")
    assert seen == {here} and len(log) == (2 if here[0] else 1)


def test_what_differs_in_eager_mode_is_not_compared(one: SyncGroup) -> None:
    """Random numbers, for one; but a function whose ops differ from call to call cannot be checked."""
    check_order(lambda x: one.all_reduce(x + torch.rand(4)), torch.ones(4), backend="aot_eager")
    calls: list[int] = []

    def counts(x: Tensor) -> Tensor:
        calls.append(1)
        return one.all_reduce(x.repeat(len(calls)))

    with pytest.raises(OrderError, match="eager mode does not run the same ops in every call"):
        check_order(counts, torch.ones(2), backend="aot_eager")


def test_errors_of_eager_mode_are_the_callers_and_others_are_findings(one: SyncGroup) -> None:
    def wrong(x: Tensor) -> Tensor:
        one.barrier(99)
        return x

    with pytest.raises(torch_gpusync.SyncError, match="channel 99 is out of range"):
        check_order(wrong, torch.ones(2))

    def wrong_if_compiled(x: Tensor) -> Tensor:
        one.barrier()
        one.barrier(99 if torch.compiler.is_compiling() else 1)
        return x

    with pytest.raises(OrderError) as caught:
        check_order(wrong_if_compiled, torch.ones(2))
    [raised, order] = caught.value.findings  # and the second back end is not tried
    assert "aot_eager: compiled code raised RuntimeError: gpusync: channel 99 is out of range" in raised
    assert "op 2: eager ran gpusync.barrier(" in order or "missing" in order


def test_a_function_that_was_not_compiled_does_not_pass(one: SyncGroup) -> None:
    all_reduce = torch.compiler.disable(one.all_reduce)
    with pytest.raises(OrderError, match="aot_eager: nothing was compared"):
        check_order(lambda x: all_reduce(x), torch.ones(2), backend="aot_eager")


def test_many_ranks_may_share_a_function() -> None:
    """torch.compile gives up on a function that it has compiled eight times."""
    groups = torch_gpusync.virtual_ranks(10, timeout=60.0)
    functions = [_exchange_of_ranks(sync) for sync in groups]

    def body(rank: int) -> int:
        return len(check_order(functions[rank], torch.full((4,), float(rank)), backend="aot_eager"))

    assert run_threads(body, 10, timeout=120) == [2] * 10
    for sync in groups:
        sync.close()


def test_a_call_that_hangs_ends_with_its_stack() -> None:
    release = threading.Event()

    def hangs(x: Tensor) -> Tensor:
        release.wait(60)
        return x

    start = time.monotonic()
    with pytest.raises(
        OrderError, match=r"the eager call did not end within 0\.5 s; it is stuck here:(.|\n)*in hangs"
    ):
        check_order(hangs, torch.ones(2), timeout=0.5)
    release.set()
    assert time.monotonic() - start < 30


def test_virtual_ranks_are_told_apart() -> None:
    groups = torch_gpusync.virtual_ranks(3, timeout=60.0)
    functions = [_exchange_of_ranks(sync) for sync in groups]

    def body(rank: int) -> list[str]:
        log = check_order(functions[rank], torch.full((4,), float(rank)), backend="aot_eager")
        return [str(op.arguments["group_name"]) for op in log]

    assert run_threads(body, 3, timeout=120) == [[sync.name] * 2 for sync in groups]
    for sync in groups:
        sync.close()


def _exchange_of_ranks(sync: SyncGroup) -> Callable[[Tensor], Tensor]:
    def exchange(x: Tensor) -> Tensor:
        sync.barrier()
        return sync.all_reduce(x)

    return exchange


# ---- libraries other than this


@ranks(3, timeout=200)
def test_collectives_of_c10d(rank: int) -> None:
    """Eager code calls dist.all_reduce, which compiled code replaces by a functional collective: the same ops of c10d."""

    def mixed(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        gathered = torch.empty(3 * y.numel())
        dist.all_gather_into_tensor(gathered, y.sin())
        return gathered.cos()

    log = check_order(mixed, torch.arange(4.0) + rank, fullgraph=True)
    assert [op.name for op in log] == ["c10d.all_reduce", "c10d.all_gather"]
    assert log[0].arguments["process_group"] == dist.group.WORLD.group_name

    def dropped(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            dist.barrier()
        return x + 1

    with pytest.raises(OrderError, match=r"missing: 1 x c10d\.barrier"):
        check_order(dropped, torch.ones(3), backend="aot_eager")


def test_executed_ops_of_a_library_of_ones_own(one: SyncGroup) -> None:
    library = torch.library.Library("gpusync_users", "DEF")
    library.define("send(Tensor x, int to, *, str tag='') -> Tensor")
    library.impl("send", lambda x, to, tag="": x + to, "CompositeExplicitAutograd")
    x = torch.ones(3)
    with executed_ops("gpusync_users", values=True) as log:
        torch.ops.gpusync_users.send(x, 2, tag="t")
        one.barrier(3)
        x.zero_()
    one.barrier()  # outside
    assert [str(op) for op in log] == [
        "gpusync_users.send(x=float32[3], to=2, tag='t')",
        f"gpusync.barrier(group_name='{one.name}', channel=3, fence=True)",
    ]
    assert log[0].payload["x"].tolist() == [1.0] * 3 and log[0].results[0].tolist() == [3.0] * 3
    library._destroy()


def test_nothing_to_compare_is_an_error(one: SyncGroup) -> None:
    def barrier(x: Tensor) -> Tensor:
        one.barrier()
        return x + 1

    with pytest.raises(
        OrderError, match="nothing was compared: eager mode ran no op of gpusync, c10d, symm_mem, mien"
    ):
        check_order(lambda x: x + 1, torch.ones(3), backend="aot_eager", namespaces=["mien"])
    with pytest.raises(TypeError, match=r"a list of names, not one: \['mine'\]"):
        check_order(barrier, torch.ones(3), namespaces="mine")

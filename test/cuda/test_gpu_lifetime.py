"""Graphs outlive their group: replayed then, they return at once, poison their outputs and touch nothing that is gone; and
the last graph to go gives the memory back."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu_ranks import DEVICE, drive, late, load_kernels, on, tokens, virtual_group
from graph_tools import capture, capture_each, replay
from op_bodies import ALGOS, messages
from rank_tools import close_all, expect
from torch import Tensor

from torch_gpusync import SyncGroup, SyncTimeoutError, virtual_buffers, virtual_ranks

N = 3
NUMEL = 5000
STAGING = 1 << 20
OPS = 12  # kernels of one replay, on each rank
OUTSIDE = 1 << 40


@dataclass
class Captured:
    """Three ranks with every sort of op in graphs: one for each, or one for all."""

    ranks: list[SyncGroup]
    graphs: list[torch.cuda.CUDAGraph]
    outputs: list[list[Tensor]]
    where: list[Tensor]  # an offset, of each rank
    inputs: list[Tensor]  # what the graphs read

    def replay(self) -> None:
        if len(self.graphs) == 1:
            self.graphs[0].replay()
            torch.cuda.synchronize()
        else:
            replay(self.ranks, self.graphs)

    def check(self) -> None:
        """What a replay gives while the group is open."""
        for y in (y for each in self.outputs for y in each):
            y.zero_()
        torch.cuda.synchronize()
        self.replay()
        everybody = torch.cat([torch.full((NUMEL,), r + 1.0) for r in range(N)])
        for r, (got, part, gathered, *sums) in enumerate(self.outputs):
            left = torch.full((NUMEL,), (r - 1) % N + 1.0)
            assert torch.equal(got.cpu(), left) and torch.equal(part.cpu(), left[:7])
            assert torch.equal(gathered.cpu(), everybody)
            assert all(torch.equal(y.cpu(), torch.full((NUMEL,), 6.0)) for y in sums)
        for sync in self.ranks:
            sync.check()

    def check_closed(self, seconds: float = 20.0) -> None:
        """What it gives when the group is closed: poison, and at once; every kernel has run, and left its mark in the token."""
        for y in (y for each in self.outputs for y in each):
            y.zero_()
        before = tokens(self.ranks)
        start = time.monotonic()
        self.replay()
        assert time.monotonic() - start < seconds
        assert all(is_poison(each) for each in self.outputs)
        assert tokens(self.ranks) == [count + OPS for count in before]


def is_poison(outputs: Sequence[Tensor]) -> bool:
    return all(bool(y.isnan().all()) for y in outputs)


def captured(each: bool, **options: Any) -> Captured:
    load_kernels()
    ranks = virtual_ranks(N, DEVICE, **{"timeout": 60.0, "buffer_bytes": STAGING, **options})
    buffers = virtual_buffers(ranks, "b", (NUMEL,), torch.float32)
    x = [torch.full((NUMEL,), r + 1.0).cuda() for r in range(N)]
    where = [torch.zeros((), dtype=torch.int64).cuda() for _ in range(N)]
    torch.cuda.synchronize()

    def body(sync: SyncGroup) -> list[Tensor]:
        r = sync.rank
        late(100 * r)
        buffers[r].put(x[r], (r + 1) % N)
        sync.barrier()
        results = [buffers[r].get(), buffers[r].get(size=(7,), offset=where[r])]
        sync.pull_end()
        sync.signal((r + 1) % N)
        sync.wait_signal((r - 1) % N)
        results.append(sync.all_gather(x[r]))
        results += [sync.all_reduce(x[r], algo=algo) for algo in ALGOS[1:]]
        sync.push_exit(1)
        return results

    if each:
        graphs, outputs = capture_each(ranks, body)
    else:
        graph, outputs = capture(ranks, body)
        graphs = [graph]
    return Captured(ranks, graphs, outputs, where, x)


def pad_bytes() -> int:
    return int(torch.ops.gpusync._cuda_pad_bytes(8, STAGING))


def takers() -> list[Tensor]:
    """Tensors that would get the memory of pads that were freed, and must stay as they are."""
    return [torch.full((pad_bytes(),), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(2 * N)]


def check_takers(taken: list[Tensor]) -> None:
    for x in taken:
        assert bool((x == 0xA5).all()), "a kernel wrote to memory that was freed"


def still_works() -> None:
    """The context, and a new group in it."""
    assert torch.arange(1000, device="cuda").sum().item() == 499500
    with virtual_group(N) as others:
        drive(others, messages, 5)


@pytest.mark.parametrize("each", [True, False], ids=["a graph for each rank", "one graph"])
def test_a_replay_after_close_returns_at_once(each: bool) -> None:
    step = captured(each)
    step.check()
    step.check()
    close_all(step.ranks)
    taken = takers()
    for k in range(3):
        if k == 2:  # an offset that would break a group that is open
            for offset in step.where:
                offset.fill_(OUTSIDE)
        step.check_closed()
    check_takers(taken)
    still_works()
    step.check_closed()
    check_takers(taken)


def test_a_replay_after_the_group_was_collected() -> None:
    """Nobody closes it; the SyncGroups and their buffers are gone, and with them what holds the tokens."""
    step = captured(each=True)
    step.check()
    outputs = step.outputs
    streams = [sync.stream for sync in step.ranks]
    alive = [weakref.ref(sync) for sync in step.ranks]
    step.ranks.clear()
    gc.collect()
    assert all(reference() is None for reference in alive), "something else keeps the groups"
    taken = takers()
    small = [torch.full((1,), -7, dtype=torch.int32, device="cuda") for _ in range(200)]
    for _ in range(3):
        for y in (y for each in outputs for y in each):
            y.zero_()
        torch.cuda.synchronize()
        start = time.monotonic()
        for graph, stream in zip(step.graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 20
        assert all(is_poison(each) for each in outputs)
    check_takers(taken)
    assert all(int(x.item()) == -7 for x in small), "a kernel wrote to a token that was freed"
    still_works()


def sweep() -> int:
    """Bytes in use when what graphs have let go of is freed, as the next group to be made or closed does."""
    gc.collect()
    torch.cuda.synchronize()
    virtual_ranks(1, DEVICE, buffer_bytes=1)[0].close()
    return torch.cuda.memory_allocated()


def settled() -> int:
    """The same when it does not change any more: the driver lets go of graphs on a thread of its own, some time."""
    seen: list[int] = []
    for _ in range(100):
        seen.append(sweep())
        if len(seen) >= 5 and len(set(seen[-5:])) == 1:
            break
        time.sleep(0.03)
    return seen[-1]


def check_given_back(before: int) -> None:
    for _ in range(100):
        if sweep() - before < STAGING:
            return
        time.sleep(0.03)
    raise AssertionError(f"{sweep() - before} bytes are not given back")


@pytest.mark.parametrize("each", [True, False], ids=["a graph for each rank", "one graph"])
@pytest.mark.parametrize("first", ["groups", "graphs"])
def test_the_last_one_gives_the_memory_back(each: bool, first: str) -> None:
    load_kernels()
    before = settled()
    for _ in range(3):
        step = captured(each)
        step.check()
        if first == "groups":
            close_all(step.ranks)
            step.check_closed()
            assert settled() - before >= N * pad_bytes(), "the graphs do not keep what they touch"
            step.check_closed()
        else:
            step.graphs.clear()
            assert settled() - before >= N * pad_bytes()
            drive(step.ranks, messages, 3)
            close_all(step.ranks)
        del step
        check_given_back(before)


def test_many_captures_of_one_group() -> None:
    """Each graph has a share in the memory, which outlives the group, and all of them but the last."""
    before = settled()
    ranks = virtual_ranks(1, DEVICE, buffer_bytes=STAGING)
    graphs: list[torch.cuda.CUDAGraph] = []
    for _ in range(20):
        graphs[:] = [torch.cuda.CUDAGraph()]
        with torch.cuda.graph(graphs[0], stream=ranks[0].stream):
            ranks[0].barrier()
    count = tokens(ranks)[0]
    graphs[0].replay()
    assert tokens(ranks) == [count + 1]
    ranks[0].check()
    close_all(ranks)
    assert settled() - before >= pad_bytes()
    graphs[0].replay()
    assert tokens(ranks) == [count + 2]
    graphs.clear()
    check_given_back(before)


def test_a_rank_closes_while_others_replay() -> None:
    """Its own graph returns at once and harms nobody; the others' end early, with an error that names it."""
    step = captured(each=True)
    step.check()
    step.ranks[2].close()
    with on(step.ranks[2]):
        step.graphs[2].replay()
    torch.cuda.synchronize()
    assert is_poison(step.outputs[2])
    for sync in step.ranks[:2]:
        sync.check()
    taken = takers()
    start = time.monotonic()
    replay(step.ranks, step.graphs, absent=[2])
    assert time.monotonic() - start < 20
    for sync in step.ranks[:2]:
        error = expect(SyncTimeoutError, "has closed the group", sync.check)
        assert error.missing_ranks == [2]
    assert all(is_poison(each) for each in step.outputs[:2])
    replay(step.ranks, step.graphs)
    assert all(is_poison(each) for each in step.outputs)
    close_all(step.ranks)
    step.check_closed()
    check_takers(taken)
    still_works()


def test_close_while_replays_are_under_way() -> None:
    """They end, right or given up, and later ones are poisoned; memory and context are whole."""
    for _ in range(5):
        step = captured(each=True)
        step.check()
        for sync in step.ranks:
            with on(sync):
                for _ in range(3):
                    late(2000)
                    step.graphs[sync.rank].replay()
        close_all(step.ranks)
        taken = takers()
        torch.cuda.synchronize()
        for each in step.outputs:
            for y in each[3:]:
                assert bool((y.isnan() | (y == 6.0)).all())
        step.check_closed()
        check_takers(taken)
    still_works()


def _put(sync: SyncGroup, buffer: Any, x: Tensor) -> None:
    buffer.put(x)


def _push(sync: SyncGroup, buffer: Any, x: Tensor) -> None:
    sync.push_exit()


def _signal(sync: SyncGroup, buffer: Any, x: Tensor) -> None:
    sync.signal(0)


@pytest.mark.parametrize("call", [_put, _push, _signal])
def test_one_op_is_enough(call: Callable[[SyncGroup, Any, Tensor], None]) -> None:
    """A graph of a single op keeps the memory as well, whichever op it is."""
    load_kernels()
    ranks = virtual_ranks(1, DEVICE, buffer_bytes=STAGING)
    buffer = ranks[0].buffer("b", (NUMEL,), torch.float32)
    x = torch.ones(NUMEL).cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ranks[0].stream):
        call(ranks[0], buffer, x)
    graph.replay()
    before = tokens(ranks)[0]
    close_all(ranks)
    taken = takers()
    for _ in range(3):
        graph.replay()
    assert tokens(ranks) == [before + 3]
    check_takers(taken)
    still_works()


def test_a_group_is_closed_inside_the_capture_that_uses_it() -> None:
    ranks = virtual_ranks(1, DEVICE, buffer_bytes=STAGING)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ranks[0].stream):
        ranks[0].barrier()
        close_all(ranks)
    taken = takers()
    before = tokens(ranks)[0]
    graph.replay()
    assert tokens(ranks) == [before + 1]
    check_takers(taken)
    still_works()

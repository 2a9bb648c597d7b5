"""What processes that share a GPU do beyond the bodies that virtual ranks run, too."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import DEVICE, late, settle
from op_bodies import messages
from rank_tools import expect, learn, tell
from torch import Tensor

from torch_gpusync import SyncError, SyncGroup, SyncMismatchError, SyncTimeoutError


def replays(sync: SyncGroup, count: int) -> None:
    """A graph of this rank's own with fresh data at every replay; each op runs once in each."""
    n, r = sync.world_size, sync.rank
    buffer = sync.buffer("x", (64,), torch.float32)
    data = [torch.arange(64) + 100.0 * q + 1000 * torch.arange(count)[:, None] for q in range(n)]
    table = data[r].cuda()
    x, wide = torch.zeros(64).cuda(), torch.zeros(70_000).cuda()
    sync.barrier()
    sync.all_reduce(wide)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.put(x)
        sync.barrier()
        seen = [buffer.get(peer) for peer in range(n)]
        sync.barrier(1, fence=False)
        total = sync.all_reduce(wide)
        largest = sync.all_reduce(x, "max")
    before = int(sync.token.item())
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for k in range(count):
        x.copy_(table[k])
        wide.fill_(k + r)
        if (k + r) % 50 == 0:
            late(200)
        graph.replay()
        kept.append((torch.stack(seen), total.clone(), largest.clone()))
    settle(sync)
    assert int(sync.token.item()) == before + count * (n + 5)
    for k, (rows, sums, most) in enumerate(kept):
        everybody = torch.stack([part[k] for part in data])
        assert torch.equal(rows.cpu(), everybody), f"replay {k}"
        assert torch.equal(most.cpu(), everybody.max(0).values), f"replay {k}"
        assert (sums == n * k + n * (n - 1) / 2).all(), f"replay {k}"


def replays_after_close(sync: SyncGroup) -> None:
    """This rank's graph when all ranks have closed the group, and the symmetric buffer is gone."""
    n, r = sync.world_size, sync.rank
    buffer = sync.buffer("x", (5000,), torch.float32)
    x = torch.full((5000,), r + 1.0).cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.put(x, (r + 1) % n)
        sync.barrier()
        seen = buffer.get()
        sync.pull_end()
        total, gathered = sync.all_reduce(x), sync.all_gather(x)
    graph.replay()
    settle(sync)
    assert (seen == (r - 1) % n + 1.0).all() and (total == n * (n + 1) / 2).all()
    assert gathered[::5000].tolist() == [q + 1.0 for q in range(n)]
    sync.close()
    for _ in range(2):
        for y in (seen, total, gathered):
            y.zero_()
        before = int(sync.token.item())
        graph.replay()
        assert int(sync.token.item()) == before + 6
        assert all(y.isnan().all() for y in (seen, total, gathered))
        _go_on(range(n))  # frees what no graph holds, and takes its place


def graphed_callables(sync: SyncGroup, count: int) -> None:
    """Forward and backward as graphs, over two groups; warm-up, capture and replay are in step on all ranks."""
    n, r = sync.world_size, sync.rank
    other = SyncGroup(device=DEVICE, name="other", timeout=20.0)

    def step(x: Tensor) -> Tensor:
        y = sync.all_reduce(x * (r + 1))
        other.barrier()
        return other.all_reduce(y * y)

    # Of the outputs' sum: all_reduce of ones, through y * y, all_reduce, through the factor.
    def check(x: Tensor, y: Tensor, values: list[Tensor]) -> None:
        inner = torch.stack([values[q] * (q + 1) for q in range(n)]).sum(0)
        torch.testing.assert_close(y.detach().cpu(), n * inner * inner)
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), n * n * 2 * inner * (r + 1))

    def inputs(k: int) -> list[Tensor]:
        return [torch.arange(32.0) + 3 * q + k for q in range(n)]

    def run(function: Any, k: int) -> int:
        values = inputs(k)
        before = int(sync.token.item())
        x = values[r].cuda().requires_grad_()
        y = function(x)
        y.sum().backward()
        check(x, y, values)
        return int(sync.token.item()) - before

    once = run(step, 0)
    assert once == 5
    before = int(sync.token.item())
    graphed = torch.cuda.make_graphed_callables(step, (torch.zeros(32).cuda().requires_grad_(),))
    assert int(sync.token.item()) - before == 3 * once  # its warm-up; capturing runs nothing
    for k in range(count):
        if k % 10 == 3:
            assert run(step, k) == once  # eager calls between replays
        assert run(graphed, k) == once, k
    other.check()


def groups_of_some(sync: SyncGroup, rounds: int) -> None:
    """Groups of some of the ranks, whose processes have set up different numbers of groups before."""
    ranks = range(sync.world_size)
    mine = {}
    for members in [m for m in ([0, 1], [0, 2], [1, 2], [1]) if max(m) < sync.world_size]:
        process_group = dist.new_group(members)
        if sync.rank in members:
            name = "of " + "".join(map(str, members))
            mine[name] = (SyncGroup(process_group, device=DEVICE, name=name, timeout=20.0), members)
    dist.barrier()
    for k in range(rounds):
        x = {r: torch.full((100,), 10.0 * r + k) for r in ranks}
        for group, members in mine.values():
            group.barrier(fence=False)
            y = group.all_reduce(x[sync.rank].to(DEVICE))
            settle(group)
            assert torch.equal(y.cpu(), torch.stack([x[r] for r in members]).sum(0)), (members, k)


def inside_a_capture(sync: SyncGroup) -> None:
    """Set-up is refused on all ranks while they capture, and spoils neither the capture nor later set-up."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        text = "cannot be made while a CUDA graph is captured: make it before"
        expect(SyncError, text, SyncGroup, device=DEVICE, name="late")
        expect(SyncError, text, sync.buffer, "late", (4,), torch.float32)
        sync.barrier()
    for _ in range(5):
        graph.replay()
    settle(sync)
    late_group = SyncGroup(device=DEVICE, name="late", timeout=20.0)
    sync.buffer("late", (4,), torch.float32)
    messages(late_group, 10)


def wait_for_one(sync: SyncGroup) -> str:
    """Rank 1 does not come: an error in time that names it, a context and a process group that go on."""
    messages(sync, 5)
    sync.timeout = 1.0
    text = ""
    if sync.rank != 1:
        start = time.monotonic()
        y = sync.all_reduce(torch.ones(100, device=DEVICE))
        torch.cuda.synchronize()
        assert 1.0 <= time.monotonic() - start < 2.5
        assert y.isnan().all()
        error = expect(SyncTimeoutError, "rank 1 .*alive", sync.check)
        assert (error.op, error.missing_ranks) == ("all_reduce", [1])
        text = str(error)
        tell(f"gave up {sync.rank}")
    else:
        for rank in range(sync.world_size):
            if rank != 1:
                learn(f"gave up {rank}")
        assert expect(SyncTimeoutError, "is broken", sync.barrier).missing_ranks == [1]
    _go_on(range(sync.world_size))
    sync.close()
    return text


def bounces(sync: SyncGroup, rounds: int) -> None:
    """A word's way to the peer and back, timed. A peer that stays away ends it, and breaks nothing."""
    op, rank = torch.ops.gpusync._cuda_ping_pong, sync.rank
    if rank < 2:
        for first, fence in ((1, False), (100_000, True)):
            taken = op(sync.token, sync.name, 1 - rank, first, rounds, fence)
            assert 0 < int(taken.item()) < 2e9, (fence, taken)
    if rank == 0:
        assert int(op(sync.token, sync.name, 1, 200_000, rounds, False).item()) == -1
    for peer, first, number in ((rank, 1, 1), (1 - min(rank, 1), 0, 1), (1 - min(rank, 1), 1, 0)):
        expect(RuntimeError, "needs another rank", op, sync.token, sync.name, peer, first, number, False)
    messages(sync, 5)


def call_different_things(sync: SyncGroup) -> None:
    """Small sizes, which are pushed, and large ones."""
    start = time.monotonic()
    last = sync.world_size - 1
    y = sync.all_reduce(torch.ones(10 + (sync.rank == last), device=DEVICE))
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5.0 and y.isnan().all()
    error = expect(SyncMismatchError, "all_reduce", sync.check)
    assert len({error.calls[rank] for rank in range(last)}) == 1, error.calls
    assert error.calls[0] != error.calls[last], error.calls
    _go_on(range(sync.world_size))
    sync.close()


def lose_one(sync: SyncGroup, busy: bool) -> str:
    """The last rank is killed; `busy`: while a kernel of it waits for the others. They are told that it is dead, and go on
    without it."""
    last = sync.world_size - 1
    messages(sync, 5)
    if sync.rank == last:
        if busy:
            sync.barrier(5)
        else:
            settle(sync)
        tell("victim", str(os.getpid()))
        time.sleep(60)
    victim = int(learn("victim"))
    if sync.rank == 0:
        time.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
    sync.timeout = 2.0
    start = time.monotonic()
    sync.barrier()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 6.0
    error = expect(SyncTimeoutError, f"rank {last} .*pid {victim}, dead", sync.check)
    assert (error.op, error.missing_ranks) == ("barrier", [last])
    _go_on(range(last))
    sync.close()
    return str(error)


def _go_on(ranks: range) -> None:
    """The context works, and a new group of these ranks."""
    assert torch.arange(1000, device=DEVICE).sum().item() == 499500
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    survivors = SyncGroup(group, device=DEVICE, name="survivors", timeout=20.0)
    messages(survivors, 10)
    survivors.close()

"""A broken group is made usable again, in place, and nothing of its first life counts in the second."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_tools import check_health, close_all, expect, learn, slack, tell, timed

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, SyncMismatchError, SyncTimeoutError, reset
from torch_gpusync.testing import run_ranks, run_threads

TIMEOUT = 0.4

# What rank `late` does not do in time. It makes the call late, when the others have given up, or never.
CALLS: list[Callable[[SyncGroup], Any]] = [
    lambda sync: sync.barrier(),
    lambda sync: sync.barrier(3, fence=False),
    lambda sync: sync.pull_start(1),
    lambda sync: sync.pull_end(2),
    lambda sync: sync.all_reduce(torch.ones(32, 64)),
    lambda sync: sync.all_reduce(torch.ones(300_000), algo="pull_two_shot"),
]


def _assert_as_new(sync: SyncGroup, salt: int) -> None:
    assert not sync.is_broken
    sync.check()
    assert torch.ops.gpusync._calls(sync.name) == 0
    assert sync.push_epoch().item() == 0
    sync.push_exit()
    for k in range(3):
        check_health(sync, salt + k)


def _break(sync: SyncGroup, late: int, call: Callable[[SyncGroup], Any], comes: bool) -> None:
    """All but rank `late` give the call up."""
    if sync.rank == late:
        for other in {*range(sync.world_size)} - {late}:
            learn(f"{sync.name} {_serial[0]} {other}")
        if comes:
            expect(SyncTimeoutError, "is broken", call, sync)
    else:
        error = expect(SyncTimeoutError, "stays broken until all ranks call reset()", call, sync)
        assert error.missing_ranks == [late]
        tell(f"{sync.name} {_serial[0]} {sync.rank}")
    _serial[0] += 1


_serial = [0]  # of the breaks; the same on all ranks


def _after_a_late_rank(rank: int) -> None:
    sync = SyncGroup(timeout=TIMEOUT)
    buffer = sync.buffer("b", (4,), torch.int64)
    address = sync.token.data_ptr()
    buffer.put(torch.arange(4) + 10 * rank)
    for number, call in enumerate(CALLS):
        sync.timeout = TIMEOUT
        late = number % 3
        if rank == (late + 1) % 3:  # out of step in all that is not collective, too
            sync.signal(late, 5)
            sync.push_exit()
            sync.push_exit(1)
        _break(sync, late, call, comes=number % 2 == 0)
        start = time.monotonic()
        sync.reset()
        assert time.monotonic() - start < 5.0 * slack()
        sync.timeout = 30.0
        _assert_as_new(sync, 10 * number)
        assert buffer.get((rank + 1) % 3).tolist() == [10 * ((rank + 1) % 3) + i for i in range(4)]
    assert sync.token.data_ptr() == address


def test_after_a_late_rank() -> None:
    run_ranks(_after_a_late_rank, 3)


def test_after_a_late_rank_of_virtual_ranks() -> None:
    ranks = torch_gpusync.virtual_ranks(4, timeout=TIMEOUT)
    for number, call in enumerate(CALLS):
        late = number % 4

        def break_it(rank: int, late: int = late, call: Callable[[SyncGroup], Any] = call) -> None:
            if rank != late:
                expect(SyncTimeoutError, f"for rank {late} ", call, ranks[rank])

        run_threads(break_it, 4)
        if number % 2 == 0:
            expect(SyncTimeoutError, "is broken", call, ranks[late])
        expect(SyncError, "all ranks of a group, and got 3", torch_gpusync.virtual_reset, ranks[:3])
        torch_gpusync.virtual_reset(ranks)
        for sync in ranks:
            sync.timeout = 30.0
        run_threads(lambda rank, salt=number: _assert_as_new(ranks[rank], salt), 4)
        for sync in ranks:
            sync.timeout = TIMEOUT
    close_all(ranks)


def _after_a_mismatch(rank: int) -> None:
    """In the middle of other things, twice; then an interrupted one."""
    sync = SyncGroup(timeout=30.0)
    for salt in range(2):
        check_health(sync, salt)
        sync.signal((rank + 1) % 3, 2)
        dist.barrier()
        size = 5 if rank == salt else 6
        expect(SyncMismatchError, "does not match", sync.all_reduce, torch.ones(size))
        sync.reset()
        _assert_as_new(sync, salt)
    # The signals are gone, and so is a call without elements that only one rank has made.
    if rank == 0:
        sync.all_reduce(torch.ones(0))
    dist.barrier()
    sync.reset()
    _assert_as_new(sync, 9)
    dist.barrier()
    sync.timeout = TIMEOUT
    if rank == 1:
        error = expect(SyncTimeoutError, "for rank 0 ", sync.wait_signal, 0, 2)
        assert (error.op, error.missing_ranks) == ("wait_signal", [0])
    dist.barrier()
    sync.reset()
    sync.timeout = 30.0
    _assert_as_new(sync, 12)


def test_after_a_mismatch_and_signals_that_nobody_has_waited_for() -> None:
    run_ranks(_after_a_mismatch, 3)


def _near_the_wrap(rank: int) -> None:
    sync = SyncGroup(timeout=30.0)
    for start in (0xFFFFFFFE, 0x7FFFFFFE):
        dist.barrier()
        torch.ops.gpusync._preset(sync.name, start)
        dist.barrier()
        for salt in range(4):  # across the wrap
            check_health(sync, salt)
        sync.timeout = TIMEOUT
        _break(sync, 1, CALLS[0], comes=True)
        sync.reset()
        sync.timeout = 30.0
        _assert_as_new(sync, 5)


def test_counters_near_their_wrap() -> None:
    run_ranks(_near_the_wrap, 3)


def _whole(rank: int) -> None:
    """A whole group can be reset, over and over; a rank that is fast does not harm one that is slow."""
    sync = SyncGroup(timeout=30.0)
    for k in range(60):
        sync.signal((rank + 1) % 3)
        for _ in range(k % 3):
            sync.barrier(k % 2)
        if (rank + k) % 3 == 0:
            time.sleep(0.003)
        sync.reset()
        sync.signal((rank + 2) % 3)
        sync.wait_signal((rank + 1) % 3)
        x = sync.all_reduce(torch.full((7,), float(rank + k)))
        assert x.tolist() == [3.0 + 3 * k] * 7
    assert sync.push_epoch().item() == 0


def test_a_whole_group() -> None:
    run_ranks(_whole, 3)


def _compiled(rank: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    sync = SyncGroup(timeout=60.0)
    buffer = sync.buffer("b", (3,), torch.float32)
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter)
    def step(x: torch.Tensor) -> torch.Tensor:
        buffer.put(x * 2)
        sync.barrier()
        left = buffer.get((sync.rank + 2) % 3)
        sync.barrier(1)
        return left + sync.all_reduce(x)

    def check(k: int) -> None:
        x = torch.full((3,), float(rank + k))
        assert step(x).tolist() == [2.0 * ((rank + 2) % 3 + k) + 3 + 3 * k] * 3

    check(0), check(1)
    for k in range(2):
        if rank == k:
            learn(f"failed {k} {(k + 1) % 3}"), learn(f"failed {k} {(k + 2) % 3}")
            expect(RuntimeError, "is broken", step, torch.ones(3))
        else:
            sync.timeout = TIMEOUT
            expect(RuntimeError, "stays broken", step, torch.ones(3))
            tell(f"failed {k} {rank}")
        sync.reset()
        sync.timeout = 60.0
        check(2 + k), check(7 - k)
    assert counter.frame_count == 1

    def with_reset(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        sync.reset()
        return sync.all_reduce(y)

    refused = torch.compile(with_reset, fullgraph=True, backend="aot_eager")
    expect(
        torch._dynamo.exc.Unsupported,
        r"reset\(\) cannot be compiled: call it outside",
        refused,
        torch.ones(2),
    )
    check(11)
    torch._dynamo.reset()
    assert torch.compile(with_reset, backend="aot_eager")(torch.ones(2)).tolist() == [6.0, 6.0]


def test_compiled_functions_go_on() -> None:
    run_ranks(_compiled, 3, timeout=150)


# ---- resets that fail


def _one_does_not_come(rank: int) -> None:
    reset.MIN_SECONDS = 1.0
    sync = SyncGroup(timeout=TIMEOUT)
    check_health(sync)
    _break(sync, 2, CALLS[0], comes=True)
    if rank == 2:
        learn("no reset 0"), learn("no reset 1")
    else:
        error, seconds = timed(sync.reset)
        assert isinstance(error, SyncTimeoutError), error
        assert (error.op, error.channel, error.missing_ranks) == ("reset", -1, [2])
        assert (
            "waited 1.0 s for rank 2 (global 2): every rank" in str(error) and 0.9 < seconds < 3.0 * slack()
        )
        tell(f"no reset {rank}")
    # It is as broken as before, with the same failure; and all can try again.
    assert expect(SyncTimeoutError, "is broken", sync.barrier).op == "barrier"
    reset.MIN_SECONDS = 30.0
    sync.reset()
    sync.timeout = 30.0
    _assert_as_new(sync, 3)
    # A whole group stays whole.
    reset.MIN_SECONDS = sync.timeout = 1.0
    if rank == 1:
        learn("no reset again 0"), learn("no reset again 2")
    else:
        expect(SyncTimeoutError, "for rank 1 ", sync.reset)
        tell(f"no reset again {rank}")
    assert not sync.is_broken
    sync.timeout = 30.0
    check_health(sync)


def test_a_rank_that_does_not_come() -> None:
    run_ranks(_one_does_not_come, 3)


def _dies(rank: int, when: str) -> None:
    sync = SyncGroup(timeout=30.0)
    check_health(sync)
    if rank == 2:
        if when == "between the meetings":
            rebase = reset._rebase

            def die(sync: SyncGroup) -> str:
                rebase(sync)
                os._exit(0)

            reset._rebase = die
            sync.reset()
        if when == "closed":
            sync.close()
            learn("failed 0"), learn("failed 1")
            return
        os._exit(0)
    if when != "between the meetings":
        expect(SyncTimeoutError, "for rank 2 ", sync.barrier)
    for _ in range(2):
        error, seconds = timed(sync.reset)
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [2], error
        assert "for rank 2 (global 2), which has ended or has closed the group: every" in str(error)
        assert seconds < 10.0 * slack()
    if when == "between the meetings":
        # The group was whole before: ranks that have re-based must not meet ranks that have not.
        pattern = r"reset\(group='world'\) on rank \d .* was begun, and not all ranks have ended it"
        assert type(expect(SyncError, pattern, sync.check)) is SyncError
        expect(SyncError, pattern, sync.barrier)
    else:
        expect(SyncTimeoutError, "for rank 2 ", sync.check)
        expect(SyncTimeoutError, "for rank 2 ", sync.barrier)
    tell(f"failed {rank}")


@pytest.mark.parametrize("when", ["before", "closed", "between the meetings"])
def test_a_rank_that_is_gone(when: str) -> None:
    run_ranks(_dies, 3, when, lost=() if when == "closed" else (2,))


def _misuse(rank: int) -> None:
    reset.MIN_SECONDS = 2.0
    sync = SyncGroup(timeout=2.0)
    other = SyncGroup(name="other", timeout=2.0)
    expect(
        SyncError,
        r"disagree on group in reset \(rank 0: 'world'; rank 1: 'other'",
        (other if rank == 1 else sync).reset,
    )
    make = partial(sync.buffer, "b", (1,), torch.int8)
    expect(SyncError, "disagree on call in ", make if rank == 0 else sync.reset)
    check_health(sync)
    # Another thread of the rank is in a call, and stays there: this rank cannot, and says so to all.
    sync.timeout = other.timeout = 60.0
    reset.MIN_SECONDS = 1.0
    dist.barrier()
    if rank == 1:
        waiting = threading.Thread(target=sync.wait_signal, args=(0, 3))
        waiting.start()
        time.sleep(0.05)
        reset.MIN_SECONDS, sync._timeout = 0.5, 0.5
        expect(SyncError, "^gpusync: reset of group .* for another thread of rank 1", sync.reset)
        sync._timeout = 60.0
        tell("told")
        waiting.join()
    else:
        expect(SyncError, "reset of group 'world' failed on rank 1: .*another thread of rank 1", sync.reset)
        learn("told")
        if rank == 0:
            sync.signal(1, 3)
    check_health(sync)
    sync.reset()
    check_health(sync)
    dist.barrier()
    other.close()
    expect(SyncError, "no group 'other': it was never made here, or it was closed", other.reset)
    dist.barrier()
    dist.destroy_process_group()
    expect(SyncError, r"was destroyed, and the ranks meet through it in reset\(\)", sync.reset)
    check_health(sync)


def test_misuse() -> None:
    run_ranks(_misuse, 3)

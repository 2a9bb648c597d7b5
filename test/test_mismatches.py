"""Ranks that call different things are told what each called; ranks that are only late are not accused of it.

Three processes or more: with two, nobody can tell which of them is the odd one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_tools import check_health, expect, learn, slack, tell

from torch_gpusync import SyncGroup, SyncMismatchError, SyncTimeoutError
from torch_gpusync.testing import run_ranks

TIMEOUT = 0.7

# ---- found out where they meet

MISMATCHES: dict[str, tuple[Callable[[SyncGroup], Any], str, Callable[[SyncGroup], Any], str]] = {
    "fence": (
        lambda s: s.barrier(),
        r"barrier\(channel=0, fence=True\)",
        lambda s: s.barrier(fence=False),
        r"barrier\(channel=0, fence=False\)",
    ),
    "end fence": (
        lambda s: s.pull_end(),
        r"pull_end\(channel=0, fence=False\)",
        lambda s: s.pull_end(fence=True),
        r"pull_end\(channel=0, fence=True\)",
    ),
    "barrier or start": (
        lambda s: s.barrier(2),
        r"barrier\(channel=2, fence=True\)",
        lambda s: s.pull_start(2),
        r"pull_start\(channel=2\)",
    ),
    "size": (
        lambda s: s.all_reduce(torch.ones(4, 8)),
        r"all_reduce f32\[4, 8\] sum pull_one_shot",
        lambda s: s.all_reduce(torch.ones(4, 9)),
        r"all_reduce f32\[4, 9\] sum pull_one_shot",
    ),
    "dtype": (
        lambda s: s.all_reduce(torch.ones(5)),
        r"all_reduce f32\[5\] sum",
        lambda s: s.all_reduce(torch.ones(5, dtype=torch.int32)),
        r"all_reduce i32\[5\] sum",
    ),
    "algo": (
        lambda s: s.all_reduce(torch.ones(5)),
        r"all_reduce f32\[5\] sum pull_one_shot",
        lambda s: s.all_reduce(torch.ones(5), algo="push_one_shot"),
        r"all_reduce f32\[5\] sum push_one_shot",
    ),
    "reduce_op": (
        lambda s: s.all_reduce(torch.ones(5)),
        r"all_reduce f32\[5\] sum",
        lambda s: s.all_reduce(torch.ones(5), "max"),
        r"all_reduce f32\[5\] max",
    ),
}


def _mismatch(rank: int) -> None:
    for number, (name, (usual, usual_text, odd, odd_text)) in enumerate(MISMATCHES.items()):
        sync = SyncGroup(name=name, timeout=20.0)
        if rank == 1:
            # Comes last, so that all have called when it is found out.
            while len(re.findall(rf"\n  call 1 {usual_text}", sync.dump())) < 2:
                time.sleep(0.002)
        start = time.monotonic()
        pattern = "does not match what other ranks called: rank 0 call 1 .*; rank 1 call 1 .*; rank 2 call 1 "
        error = expect(SyncMismatchError, pattern, odd if rank == 1 else usual, sync)
        assert time.monotonic() - start < 1.0 * slack() or rank != 1
        assert error.group == name
        texts = [usual_text, odd_text, usual_text]
        assert len(error.calls) == 3
        for text, call in zip(texts, error.calls, strict=True):
            assert re.match(text, call), (text, error.calls)
        assert sync.is_broken
        assert expect(SyncMismatchError, "is broken", sync.check).calls == error.calls
        expect(SyncMismatchError, "is broken", sync.barrier, 1 + number % 3)


def test_case_10_ranks_that_call_different_things_are_told_what_each_called() -> None:
    run_ranks(_mismatch, 3)


def _empty_on_one(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)
    check_health(sync)
    dist.barrier()  # a rank that is still on its way out of the last call would find the group broken there
    x = torch.ones(0 if rank == 1 else 3)
    if rank == 1:
        assert sync.all_reduce(x).numel() == 0
        x = torch.ones(3)
    text = r"all_reduce f32\[3\] sum pull_one_shot"
    pattern = rf"rank 0 call \d+ {text}; rank 1 call \d+ {text} after 1 call without elements; rank 2"
    while rank == 2 and sync.dump().count("f32[3]") < 2:  # so that both have called when it is found out
        time.sleep(0.002)
    expect(SyncMismatchError, pattern, sync.all_reduce, x)


def test_case_12_an_empty_call_on_one_rank_only_is_a_mismatch_of_the_next() -> None:
    run_ranks(_empty_on_one, 3)


def _late_and_different(rank: int) -> None:
    """Ranks 0 and 1 disagree; what is listed of rank 2, which has not come, is said to be an earlier call."""
    sync = SyncGroup(timeout=20.0)
    sync.pull_end(3)
    dist.barrier()
    if rank == 2:
        learn("failed 0"), learn("failed 1")
        expect(SyncMismatchError, "is broken", sync.barrier)
        return
    pattern = r"; rank 2 has not come yet: its last was call 1 pull_end\(channel=3, fence=False\)"
    expect(SyncMismatchError, pattern, sync.barrier, 0, rank == 0)
    tell(f"failed {rank}")


def test_a_rank_that_has_not_come_is_not_said_to_call_something_else() -> None:
    run_ranks(_late_and_different, 3)


# ---- found out when a wait has lasted too long

# Calls that meet in different places, so that no rank sees another's arrival: what most ranks call, and rank 1.
CROSSED: dict[str, tuple[Callable[[SyncGroup], Any], str, Callable[[SyncGroup], Any], str]] = {
    "stage": (lambda s: s.barrier(), "barrier", lambda s: s.pull_end(), "pull_end"),
    "channel": (
        lambda s: s.barrier(1),
        r"barrier\(channel=1, fence=True\)",
        lambda s: s.barrier(2),
        r"barrier\(channel=2, fence=True\)",
    ),
    "collective": (
        lambda s: s.all_reduce(torch.ones(3)),
        r"all_reduce f32\[3\] sum",
        lambda s: s.barrier(),
        "barrier",
    ),
    "wait_signal": (
        lambda s: s.barrier(),
        "barrier",
        lambda s: s.wait_signal(0),
        r"wait_signal\(channel=0, rank=0\)",
    ),
    "push_exit": (
        lambda s: (s.barrier(), s.all_reduce(torch.ones(2))),
        "barrier",
        lambda s: (s.push_exit(), s.all_reduce(torch.ones(2))),
        r"all_reduce f32\[2\]",
    ),
}


def _crossed(rank: int) -> None:
    for name, (usual, usual_text, odd, odd_text) in CROSSED.items():
        sync = SyncGroup(name=name, timeout=TIMEOUT)
        pattern = (
            r"waited \d\.\d s and does not match what other ranks called, which wait for one another: rank 0 "
        )
        error = expect(SyncMismatchError, pattern, odd if rank == 1 else usual, sync)
        for text, call in zip([usual_text, odd_text, usual_text], error.calls, strict=True):
            assert re.match(text, call), (text, error.calls)
        assert "has not come yet" not in str(error)
        dist.barrier()


def test_ranks_that_wait_for_one_another_in_different_calls() -> None:
    run_ranks(_crossed, 3)


def _not_crossed(rank: int) -> None:
    """Waits that lead to a rank which is late, and ranks that wait for signals alone, are no mismatch."""
    chain = SyncGroup(name="chain", timeout=TIMEOUT)
    if rank < 3:
        # 0 meets, 1 waits for 2, 2 waits for 3, and 3 is late.
        call = [chain.barrier, lambda: chain.wait_signal(2), lambda: chain.wait_signal(3)][rank]
        error = expect(SyncTimeoutError, "waited", call)
        assert error.missing_ranks in ([1, 2, 3], [2], [3])
    dist.barrier()
    circle = SyncGroup(name="circle", timeout=TIMEOUT)
    error = expect(SyncTimeoutError, "waited", circle.wait_signal, (rank + 1) % 4)
    assert len(error.missing_ranks) == 1
    dist.barrier()
    # Waits for itself: nobody else is to blame, and one that meets the others has a late rank before it.
    alone = SyncGroup(name="alone", timeout=TIMEOUT)
    error = expect(SyncTimeoutError, "waited", (lambda: alone.wait_signal(2)) if rank == 2 else alone.barrier)
    assert error.missing_ranks == [2]


def test_late_ranks_are_no_mismatch() -> None:
    run_ranks(_not_crossed, 4)


def _out_of_step(rank: int, extra: bool) -> str:
    """Rank 1 makes a call more, or one less, in a warm-up, and all then go on as usual."""
    sync = SyncGroup(timeout=TIMEOUT)

    def run() -> None:
        for k in range(5 + (rank == 1) * (1 if extra else -1)):
            sync.all_reduce(torch.full((8,), float(k)))
        sync.barrier()

    error = expect(SyncMismatchError, "does not match", run)
    calls = [call.split()[0].split("(")[0] for call in error.calls]
    assert calls == (
        ["barrier", "all_reduce", "barrier"] if extra else ["all_reduce", "barrier", "all_reduce"]
    )
    return str(error)


@pytest.mark.parametrize("extra", [True, False])
def test_case_36_an_unequal_warm_up_is_diagnosed(extra: bool) -> None:
    again, new = ("rank 1", "ranks 0, 2") if extra else ("ranks 0, 2", "rank 1")
    for text in run_ranks(_out_of_step, 3, extra):
        assert (
            f"out of step, by a call too many or too few: {again} called again what came before, {new} "
            in text
        )

"""Ranks as processes that share one GPU: time-sliced, or side by side under MPS (GPUSYNC_TEST_SHARING, set by the
runner; it also starts the MPS daemon)."""

from __future__ import annotations

import os

import pytest
import torch
from gpu_ranks import in_processes
from op_bodies import (
    ALGOS,
    Case,
    copies,
    layouts,
    messages,
    mixture,
    overwritten,
    pushes,
    reductions,
    signals,
)
from process_bodies import (
    call_different_things,
    graphed_callables,
    inside_a_capture,
    lose_one,
    replays,
    replays_after_close,
    wait_for_one,
)
from test_ops import DTYPES

from torch_gpusync import SyncGroup

# Time-sliced, a barrier takes several milliseconds: a short check of correctness.
MPS = os.environ.get("GPUSYNC_TEST_SHARING") == "mps"


def ops(sync: SyncGroup) -> str:
    """Every op, eager, with delays; one set of processes, because starting them is what takes the time."""
    messages(sync, 200 if MPS else 15)
    signals(sync, 100 if MPS else 5)
    pushes(sync, 60 if MPS else 5)
    copies(sync, 3 if MPS else 1, [torch.float32, torch.bfloat16, torch.int8] if MPS else [torch.float16])
    layouts(sync)
    mixture(sync, 2000 if MPS else 60, 5)
    numels = (1, 515, 6000, 700_001) if MPS else (515, 70_000)
    dtypes = DTYPES if MPS else [torch.bfloat16]
    return reductions(
        sync, [Case(dtype, "sum", numel, 1, algo) for dtype in dtypes for numel in numels for algo in ALGOS]
    )


def overwriting(sync: SyncGroup) -> None:
    for algo in ALGOS[1:]:
        overwritten(sync, 30 if MPS else 4, 70_000, algo)


def test_every_op() -> None:
    assert len(set(in_processes(ops))) == 1


def test_many_ranks() -> None:
    in_processes(messages, 40 if MPS else 3, n=8 if MPS else 5)


def test_case_04_inputs_are_overwritten_right_after_the_call() -> None:
    in_processes(overwriting)


def test_case_08_replays_with_fresh_data() -> None:
    in_processes(replays, 1000 if MPS else 15)


def test_replays_after_close() -> None:
    in_processes(replays_after_close, breaks=True)


def test_make_graphed_callables() -> None:
    in_processes(graphed_callables, 50 if MPS else 3)


def test_case_35_set_up_during_a_capture() -> None:
    in_processes(inside_a_capture)


def test_case_28_a_rank_that_does_not_come() -> None:
    first, _, third = in_processes(wait_for_one, breaks=True)
    assert "waited 1." in first and "waited 1." in third


def test_case_10_ranks_that_call_different_things() -> None:
    in_processes(call_different_things, breaks=True)


# Under MPS ranks share a context's fate while kernels run: there only a rank at rest may be killed.
@pytest.mark.parametrize("busy", [False] if MPS else [False, True])
def test_a_killed_rank_is_missed_and_survived(busy: bool) -> None:
    errors = in_processes(lose_one, busy, lost=[2], breaks=True)
    assert "dead" in errors[0] and "dead" in errors[1]

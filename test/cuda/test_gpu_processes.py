"""Ranks as processes that share one GPU, time-sliced or side by side under MPS, or have one each (GPUSYNC_TEST_SHARING, set by
the runner; it also starts the MPS daemon)."""

from __future__ import annotations

import os

import pytest
import torch
from gpu_ranks import RANKS, in_processes
from norm_bodies import DTYPES as NORMED
from norm_bodies import Norm, norms
from op_bodies import (
    ALGOS,
    Case,
    copies,
    exchanges,
    layouts,
    messages,
    mixture,
    overwritten,
    pushes,
    reductions,
    signals,
)
from process_bodies import (
    bounces,
    call_different_things,
    graphed_callables,
    groups_of_some,
    inside_a_capture,
    lose_one,
    replays,
    replays_after_close,
    wait_for_one,
)
from reference_data import DTYPES

from torch_gpusync import SyncGroup

# Time-sliced, a barrier takes several milliseconds: a short check of correctness.
SHARING = os.environ.get("GPUSYNC_TEST_SHARING", "slices")
MPS = SHARING == "mps"
SIDE_BY_SIDE = SHARING in ("mps", "none")


def ops(sync: SyncGroup) -> str:
    """Every op, eager, with delays; one set of processes, because starting them is what takes the time."""
    messages(sync, 200 if SIDE_BY_SIDE else 15)
    signals(sync, 100 if SIDE_BY_SIDE else 5)
    pushes(sync, 60 if SIDE_BY_SIDE else 5)
    copies(
        sync,
        3 if SIDE_BY_SIDE else 1,
        [torch.float32, torch.bfloat16, torch.int8] if SIDE_BY_SIDE else [torch.float16],
    )
    layouts(sync)
    exchanges(sync, (1, 33, 5000) if SIDE_BY_SIDE else (5,))
    mixture(sync, 2000 if SIDE_BY_SIDE else 60, 5)
    numels = (1, 515, 6000, 700_001) if SIDE_BY_SIDE else (515, 70_000)
    dtypes = DTYPES if SIDE_BY_SIDE else [torch.bfloat16]
    return reductions(
        sync, [Case(dtype, "sum", numel, 1, algo) for dtype in dtypes for numel in numels for algo in ALGOS]
    )


def overwriting(sync: SyncGroup) -> None:
    for algo in ALGOS[1:]:
        overwritten(sync, 30 if SIDE_BY_SIDE else 4, 70_000, algo)


def test_every_op() -> None:
    assert len(set(in_processes(ops))) == 1


def test_norms() -> None:
    cases = [Norm(dtype, 3, 1000, start) for dtype in NORMED for start in (0, 1)]
    assert len(set(in_processes(norms, cases))) == 1


def test_groups_of_some_of_the_ranks() -> None:
    in_processes(groups_of_some, 20 if MPS else 2)


def test_many_ranks() -> None:
    in_processes(messages, 40 if SIDE_BY_SIDE else 3, n={"mps": 8, "none": RANKS}.get(SHARING, 5))


def test_case_04_inputs_are_overwritten_right_after_the_call() -> None:
    in_processes(overwriting)


def test_a_word_there_and_back() -> None:
    in_processes(bounces, 1000 if SIDE_BY_SIDE else 8)


def test_case_08_replays_with_fresh_data() -> None:
    in_processes(replays, 1000 if SIDE_BY_SIDE else 15)


def test_replays_after_close() -> None:
    in_processes(replays_after_close, breaks=True)


def test_make_graphed_callables() -> None:
    in_processes(graphed_callables, 50 if SIDE_BY_SIDE else 3)


def test_case_35_set_up_during_a_capture() -> None:
    in_processes(inside_a_capture)


def test_case_28_a_rank_that_does_not_come() -> None:
    texts = in_processes(wait_for_one, breaks=True)
    assert all("waited 1." in text for rank, text in enumerate(texts) if rank != 1)


def test_case_10_ranks_that_call_different_things() -> None:
    in_processes(call_different_things, breaks=True)


# Under MPS ranks share a context's fate while kernels run: there only a rank at rest may be killed.
@pytest.mark.parametrize("busy", [False] if MPS else [False, True])
def test_a_killed_rank_is_missed_and_survived(busy: bool) -> None:
    errors = in_processes(lose_one, busy, lost=[RANKS - 1], breaks=True)
    assert all("dead" in error for error in errors[: RANKS - 1])

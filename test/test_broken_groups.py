"""A group that has broken leaves others whole, can be made again, and its error gets through compiled code and torch.ops."""

from __future__ import annotations

import re

import pytest
import torch
from rank_tools import check_health, close_all, expect, learn, slack, tell, timed

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, SyncMismatchError, SyncTimeoutError
from torch_gpusync.testing import run_ranks, run_threads

TIMEOUT = 0.7
LIMIT = TIMEOUT + 1.0  # seconds after which nobody may still be waiting


def test_one_broken_group_leaves_the_others_whole() -> None:
    broken, whole = (torch_gpusync.virtual_ranks(3, timeout=timeout) for timeout in (TIMEOUT, 20.0))

    def body(rank: int) -> None:
        if rank != 1:
            expect(SyncTimeoutError, "rank 1", broken[rank].barrier)
        check_health(whole[rank])

    run_threads(body, 3)
    close_all(broken + whole)


def _made_again(rank: int) -> None:
    """After a failure all ranks close the group and make it anew, under the same name if they like."""
    sync = SyncGroup(name="tp", timeout=TIMEOUT)
    if rank == 2:
        learn("failed 0"), learn("failed 1")
    else:
        expect(SyncTimeoutError, "rank 2", sync.barrier)
        tell(f"failed {rank}")
    assert sync.is_broken
    sync.close()
    expect(SyncError, "no group 'tp'", sync.barrier)
    again = SyncGroup(name="tp", timeout=20.0)
    assert not again.is_broken
    again.check()
    check_health(again)


def test_a_broken_group_is_closed_and_made_again_under_its_name() -> None:
    run_ranks(_made_again, 3)


# ---- errors that pass through torch


def _compiled(rank: int, backend: str) -> None:
    sync = SyncGroup(timeout=20.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        sync.barrier()
        return sync.all_reduce(x)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert compiled(torch.full((4,), float(rank))).tolist() == [3.0] * 4
    sync.timeout = TIMEOUT
    if rank == 2:
        learn("failed 0"), learn("failed 1")
        error = expect(
            RuntimeError, "on rank 2 stopped because group 'world' is broken", compiled, torch.ones(4)
        )
        assert not isinstance(error, SyncError)
        expect(SyncTimeoutError, "barrier", sync.check)
        return
    raised, seconds = timed(compiled, torch.ones(4))
    assert type(raised) is RuntimeError and seconds < LIMIT * slack(), raised
    assert re.search(r"waited \d\.\d s for rank 2 \(", str(raised))
    tell(f"failed {rank}")
    error = expect(SyncTimeoutError, r"waited \d\.\d s for rank 2 \(", sync.check)
    assert (error.group, error.op, error.channel, error.missing_ranks) == ("world", "barrier", 0, [2])
    assert TIMEOUT <= error.waited_s < LIMIT * slack()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_compiled_code_it_is_a_runtime_error_and_check_says_more(backend: str) -> None:
    run_ranks(_compiled, 3, backend, timeout=120)


def _compiled_mismatch(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return sync.all_reduce(x)

    if rank == 1:
        error = expect(
            RuntimeError,
            "does not match what other ranks called",
            torch.compile(step, fullgraph=True, backend="aot_eager"),
            torch.ones(7),
        )
        assert not isinstance(error, SyncError)
        assert len(expect(SyncMismatchError, "f32", sync.check).calls) == 3
    else:
        expect(SyncMismatchError, r"f32\[7\]", step, torch.ones(6))


def test_a_compiled_and_an_eager_rank_that_disagree() -> None:
    run_ranks(_compiled_mismatch, 3, timeout=120)


def test_torch_ops_raise_runtime_errors_with_the_same_text() -> None:
    ranks = torch_gpusync.virtual_ranks(3, timeout=TIMEOUT)

    def body(rank: int) -> None:
        if rank == 0:
            return
        error = expect(
            RuntimeError, "for rank 0 ", torch.ops.gpusync.barrier, ranks[rank].token, ranks[rank].name
        )
        assert not isinstance(error, SyncError) and "Exception raised from" not in str(error)
        expect(SyncTimeoutError, "for rank 0", ranks[rank].check)

    run_threads(body, 3)
    close_all(ranks)

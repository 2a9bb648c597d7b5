"""all_reduce_rms_norm in one kernel: right for any shape and place, in graphs, and when ranks fail."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from gpu_ranks import ON_GPU, drive, late, launch, virtual_group
from graph_tools import capture, capture_each, replay
from norm_bodies import DTYPES, Norm, assert_close_to, finite, norm_of, norms, norms_among_others
from op_bodies import assert_same_bytes, messages
from rank_tools import expect
from reference_data import reduce_in_rank_order
from torch import Tensor

from torch_gpusync import SyncGroup, SyncMismatchError, SyncTimeoutError, cuda_memory, rms_norm

SMALL = 16 << 10  # bytes that are pushed whatever was measured


@pytest.fixture(autouse=True)
def _in_one_kernel() -> Iterator[None]:
    """On a GPU nothing here goes step by step."""
    if not ON_GPU:
        yield
        return
    with mock.patch.object(rms_norm, "steps", side_effect=AssertionError("went step by step")):
        yield


def _cases() -> list[Norm]:
    shapes = [(1, 8), (3, 24), (2, 1000), (1, 2048), (1, 4096), (1, 8192), (40, 64), (7, 264)]
    return [
        Norm(dtype, rows, columns, start, float(start))
        for dtype in DTYPES
        for rows, columns in shapes
        for start in (0, 1)
        if rows * columns * dtype.itemsize <= SMALL
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_any_shape_and_place(n: int) -> None:
    with virtual_group(n) as ranks:
        assert len(set(drive(ranks, norms, _cases()))) == 1


@pytest.mark.parametrize("n", [2, 3])
def test_more_rows_than_there_are_blocks(n: int) -> None:
    """In several launches, of 128 blocks at most, where the op would go step by step."""
    with virtual_group(n) as ranks, mock.patch.object(rms_norm, "fits", lambda *_: True):
        cases = [Norm(torch.bfloat16, 900, 8), Norm(torch.float32, 131, 24, 1), Norm(torch.float16, 250, 32)]
        assert len(set(drive(ranks, norms, cases))) == 1


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_row_for_each_block(n: int) -> None:
    """As on GPUs without clusters: threads have several parcels, and read again what they have stored."""
    with mock.patch.object(cuda_memory, "has_clusters", lambda _: False), virtual_group(n) as ranks:
        assert len(set(drive(ranks, norms, _cases()))) == 1


@pytest.mark.parametrize("n", [3, 8])
def test_among_other_collectives(n: int) -> None:
    with virtual_group(n) as ranks:
        drive(ranks, norms_among_others, 120)


@pytest.mark.parametrize("epoch", [0xFFFFFFF0, 0x7FFFFFF8])
def test_counters_wrap_around(epoch: int) -> None:
    with virtual_group(3) as ranks:
        for sync in ranks:
            preset = torch.ops.gpusync._cuda_preset if ON_GPU else torch.ops.gpusync._preset
            preset(sync.name, epoch if epoch < 2**31 else epoch - 2**32)
        drive(ranks, norms_among_others, 20)


@pytest.mark.parametrize("n", [3, 8])
def test_in_a_graph(n: int) -> None:
    rows, columns = 3, 512
    with virtual_group(n) as ranks, torch.no_grad():
        x = [torch.zeros(rows, columns, dtype=torch.bfloat16).cuda() for _ in ranks]
        residual = finite(98, rows * columns, torch.bfloat16, 0).view(rows, columns)
        weight = finite(99, columns, torch.bfloat16, 0)
        before, by = residual.cuda(), weight.cuda()
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> tuple[Tensor, Tensor]:
            _, total = sync.all_reduce_rms_norm(x[sync.rank], before, by, 1e-5)
            return sync.all_reduce_rms_norm(x[sync.rank], total, by, 1e-5, 1.0)

        graph, results = capture(ranks, body)
        for k in range(50):
            values = [finite(r, rows * columns, torch.bfloat16, k).view(rows, columns) for r in range(n)]
            for mine, value in zip(x, values, strict=True):
                mine.copy_(value)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            summed = reduce_in_rank_order(values, "sum")
            expected = residual + summed + summed
            for norm, total in results:
                assert_same_bytes(total, expected, k)
                assert_close_to(norm, norm_of(expected, weight, 1e-5, 1.0), k)


# ---- ranks that fail

_ROWS, _COLUMNS = 5, 3000


def _call(sync: SyncGroup, columns: int = _COLUMNS) -> tuple[Tensor, Tensor]:
    x = torch.ones(_ROWS, columns, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        return sync.all_reduce_rms_norm(x, x, x[0], 0.0)


def _all_nan(*outputs: Tensor) -> bool:
    return all(bool(y.isnan().all()) for y in outputs)


@pytest.mark.parametrize(("n", "absent"), [(2, (1,)), (3, (2,)), (3, (0, 1)), (4, (3,)), (8, (0, 5))])
def test_a_wait_ends_and_names_the_missing_ranks(n: int, absent: tuple[int, ...]) -> None:
    with virtual_group(n) as ranks:
        drive(ranks, messages, 3)
        for sync in ranks:
            sync.timeout = 0.2
        for outputs in launch(ranks, _call, absent):
            assert _all_nan(*outputs)
        for sync in ranks:
            error = expect(SyncTimeoutError, r"all_reduce\(group", sync.check)
            assert error.missing_ranks == list(absent), error
    with virtual_group(3) as others:
        drive(others, messages, 3)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("lateness", [0.28, 0.30, 0.32, 0.38])
def test_a_wait_is_given_up_by_all_ranks_or_by_none(lateness: float, n: int) -> None:
    """A rank comes while its peers decide whether to give up. What is no NaN is right: a sum may be there in part, the norm
    of a row is whole or not there."""
    with virtual_group(n) as ranks:
        for sync in ranks:
            sync.timeout = 0.2

        def call(sync: SyncGroup) -> tuple[Tensor, Tensor]:
            if sync.rank == n - 1:
                late(lateness * 1e6)
            return _call(sync)

        results = launch(ranks, call)
        broken = [sync.is_broken for sync in ranks]
        assert broken in ([True] * n, [False] * n)
        for norm, total in results:
            right, gone = total == n + 1, norm.isnan()
            assert (right | total.isnan() if broken[0] else right).all(), total.unique().tolist()[:4]
            assert ((norm == 1) | gone).all() and (gone.all(1) == gone.any(1)).all()
            assert broken[0] or not gone.any()
        if not broken[0]:
            drive(ranks, messages, 5)


@pytest.mark.parametrize("other", ["all_reduce", "columns", "barrier"])
def test_ranks_that_call_different_things(other: str) -> None:
    with virtual_group(3) as ranks:
        x = torch.ones(_ROWS, _COLUMNS, dtype=torch.bfloat16, device="cuda")

        def call(sync: SyncGroup) -> object:
            late(50_000)  # until the hosts of all ranks have made their calls
            if sync.rank != 1:
                return _call(sync)
            if other == "all_reduce":
                return sync.all_reduce(x, algo="push_one_shot")
            return _call(sync, 2992) if other == "columns" else sync.barrier(7)

        if other == "barrier":
            for sync in ranks:
                sync.timeout = 0.5
        outputs = launch(ranks, call)
        for y in outputs:
            assert y is None or _all_nan(*(y if isinstance(y, tuple) else (y,)))
        for sync in ranks:
            if other == "barrier":  # a channel of its own: nobody compares these calls, and nobody comes
                expect(SyncTimeoutError, "all_reduce|barrier", sync.check)
            else:
                error = expect(SyncMismatchError, "does not match", sync.check)
                assert error.calls[0] == error.calls[2] != error.calls[1], error.calls
                assert "push_rms_norm" in error.calls[0], error.calls


def test_replays_of_a_broken_group_return_at_once_with_nan() -> None:
    with virtual_group(3) as ranks:
        graphs, results = capture_each(ranks, _call)
        replay(ranks, graphs)
        assert all(bool((norm == 1).all() and (total == 4).all()) for norm, total in results)
        for sync in ranks:
            sync.timeout = 0.2
        replay(ranks, graphs, absent=[1])
        assert all(sync.is_broken for sync in ranks)
        for _ in range(3):
            replay(ranks, graphs)
        assert all(_all_nan(*outputs) for outputs in results)

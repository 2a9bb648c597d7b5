"""Ranks by threads: the same protocol, up to 64 of them in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from rank_tools import check_health, close_all, expect, slack

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup
from torch_gpusync.nn.functional import copy_to_ranks, reduce_from_ranks
from torch_gpusync.testing import run_threads


def _everything(ranks: list[SyncGroup], rank: int, rounds: int) -> list[tuple[float, float]]:
    """Every op, with data that differ by rank and round; returns when the rank came to and left its barriers."""
    sync, n = ranks[rank], len(ranks)
    board = sync.buffer("board", (n, 3), torch.int64)
    stamps = []
    for k in range(rounds):
        if (rank + k) % 17 == 0:
            time.sleep(0.002)
        board.put(torch.tensor([rank, k, rank * k]), rank=(rank + k) % n, offset=3 * rank)
        came = time.monotonic()
        sync.barrier()
        stamps.append((came, time.monotonic()))
        for reader in range(n):
            expected = [reader, k, reader * k]
            assert board.get((reader + k) % n, (3,), 3 * reader).tolist() == expected
        x = torch.arange(33, dtype=torch.float32) * (rank + 1) + k
        y = sync.all_reduce(x)
        assert torch.equal(y, torch.arange(33.0) * (n * (n + 1) // 2) + n * k)
        sync.signal((rank + 1 + k) % n, 1)
        sync.wait_signal((rank - 1 - k) % n, 1)
        assert sync.push_epoch().item() == k % 2
        sync.push_exit()
        sync.pull_start(), sync.pull_end()
    return stamps


@pytest.mark.parametrize("n", [1, 2, 40, 64])
def test_case_15_many_ranks_by_threads(n: int) -> None:
    ranks = torch_gpusync.virtual_ranks(n, timeout=60.0, buffer_bytes=4096)
    assert [sync.rank for sync in ranks] == list(range(n))
    stamps = run_threads(lambda rank: _everything(ranks, rank, 6), n, timeout=90)
    for meeting in zip(*stamps, strict=True):
        assert min(left for _, left in meeting) >= max(came for came, _ in meeting)
    close_all(ranks)


def test_64_ranks_of_which_the_last_is_missing() -> None:
    ranks = torch_gpusync.virtual_ranks(64, timeout=20.0)
    for sync in ranks:
        sync.timeout = 1.0

    def body(rank: int) -> float:
        start = time.monotonic()
        if rank != 63:
            error = expect(torch_gpusync.SyncTimeoutError, r"for rank 63 \(global 63, ", ranks[rank].barrier)
            assert error.missing_ranks == [63] and len(str(error)) < 1000
        return time.monotonic() - start

    assert max(run_threads(body, 64)) < 2.0 * slack()
    close_all(ranks)


def test_64_ranks_of_which_all_but_one_are_missing() -> None:
    ranks = torch_gpusync.virtual_ranks(64, timeout=20.0)
    ranks[0].timeout = 0.3
    error = expect(
        torch_gpusync.SyncTimeoutError, r"rank 1 \(.*, rank 63 \(global 63, .*\)\. The", ranks[0].barrier
    )
    assert error.missing_ranks == list(range(1, 64))
    assert len(ranks[5].dump().splitlines()) == 65
    close_all(ranks)


def test_names_and_tokens() -> None:
    first = torch_gpusync.virtual_ranks(2, name="tp")
    second = torch_gpusync.virtual_ranks(3, name="dp")
    assert [sync.name for sync in first + second] == ["tp/0", "tp/1", "dp/0", "dp/1", "dp/2"]
    tokens = {sync.token.data_ptr() for sync in first + second}
    assert len(tokens) == 5
    for sync in first + second:
        assert sync.token.dtype == torch.int32 and sync.token.shape == (1,) and not sync.token.is_inference()
        assert (sync.device, sync.stream) == (torch.device("cpu"), None)
    run_threads(lambda rank: check_health(first[rank]), 2)
    run_threads(lambda rank: check_health(second[rank]), 3)
    expect(
        SyncError,
        "already has an open group 'tp/[01]': close it first",
        torch_gpusync.virtual_ranks,
        2,
        name="tp",
    )
    run_threads(lambda rank: check_health(first[rank], 1), 2)
    close_all(first)
    again = torch_gpusync.virtual_ranks(4, name="tp")
    run_threads(lambda rank: check_health(again[rank], 2), 4)
    close_all(again + second)


def test_default_names_count_up_and_collected_groups_are_closed() -> None:
    names = []
    for _ in range(3):
        ranks = torch_gpusync.virtual_ranks(1)
        names.append(ranks[0].name)
        del ranks
        gc.collect()
        expect(SyncError, f"no group '{names[-1]}'", _raise_sync_error, names[-1])
    stems = [name.split("/")[0] for name in names]
    numbers = [int(stem.removeprefix("virtual") or 0) for stem in stems]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def _raise_sync_error(name: str) -> None:
    try:
        torch.ops.gpusync._dump(name)
    except RuntimeError as error:
        raise SyncError(str(error)) from None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "virtual_ranks makes 1 to 64 ranks, not 0"),
    ({"n": 65}, "virtual_ranks makes 1 to 64 ranks, not 65"),
    ({"n": -1}, "makes 1 to 64 ranks"),
    ({"n": 2.0}, r"makes 1 to 64 ranks, not 2\.0"),
    ({"n": True}, "makes 1 to 64 ranks, not True"),
    ({"n": 2, "name": ""}, "name must be a string that is not empty"),
    ({"n": 2, "name": 3}, "name must be a string that is not empty, not 3"),
    ({"n": 2, "channels": 0}, "channels must be a whole number from 1 to 1024"),
    ({"n": 2, "buffer_bytes": 0}, "buffer_bytes must be"),
    ({"n": 2, "timeout": 0}, "timeout must be positive"),
    ({"n": 2, "device": "meta"}, "device 'meta' has no back end"),
    ({"n": 2, "device": "gpu"}, "device must be 'cpu', 'cuda' or 'cuda:N', not 'gpu'"),
]


@pytest.mark.parametrize(("arguments", "pattern"), BAD)
def test_bad_arguments(arguments: dict[str, Any], pattern: str) -> None:
    start = time.monotonic()
    expect(SyncError, pattern, torch_gpusync.virtual_ranks, **arguments)
    assert time.monotonic() - start < 2.0 * slack()


@pytest.mark.parametrize("timeout", [float("inf"), timedelta.max, 1e-3])
def test_timeouts_without_measure(timeout: float | timedelta) -> None:
    """For ever is allowed, and a millisecond is too when nobody has to be waited for that long."""
    ranks = torch_gpusync.virtual_ranks(2, timeout=30.0)
    for sync in ranks:
        sync.timeout = timeout
    ranks[0].signal(1)
    ranks[1].wait_signal(0)
    if timeout != 1e-3:
        run_threads(lambda rank: check_health(ranks[rank]), 2)
    else:
        expect(torch_gpusync.SyncTimeoutError, r"waited 0\.\d s for rank 1", ranks[0].barrier)
    close_all(ranks)


def test_buffers_of_all_ranks_from_one_thread() -> None:
    ranks = torch_gpusync.virtual_ranks(3, timeout=20.0)
    buffers = torch_gpusync.virtual_buffers(ranks, "b", (2, 2), torch.float64)
    for rank, buffer in enumerate(buffers):
        buffer.put(torch.full((2, 2), float(rank), dtype=torch.float64), rank=(rank + 1) % 3)
    assert [buffer.get()[0, 0].item() for buffer in buffers] == [2.0, 0.0, 1.0]
    expect(SyncError, "already has a buffer 'b'", torch_gpusync.virtual_buffers, ranks, "b", (1,), torch.int8)
    run_threads(lambda rank: check_health(ranks[rank]), 3)
    close_all(ranks)


def test_compiled_functions_of_virtual_ranks() -> None:
    """Each rank has its own name and token in its graph; they meet all the same, forward and backward."""
    ranks = torch_gpusync.virtual_ranks(3, timeout=60.0)

    def make(sync: SyncGroup) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            sync.barrier()
            return reduce_from_ranks(copy_to_ranks(x, sync) * (sync.rank + 1), sync)

        return torch.compile(step, fullgraph=True, backend="aot_eager")

    steps = [make(sync) for sync in ranks]

    def body(rank: int) -> None:
        for k in range(3):
            x = torch.full((4,), float(k + 1), requires_grad=True)
            y = steps[rank](x)
            assert y.tolist() == [6.0 * (k + 1)] * 4
            y.sum().backward()
            assert x.grad is not None and x.grad.tolist() == [6.0] * 4

    run_threads(body, 3, timeout=120)
    close_all(ranks)

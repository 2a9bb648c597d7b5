"""Kernels of a user's own on a group's channel: user_kernel.cu, compiled here with nvcc against the installed headers."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import user_kernel
from device_code import build_library
from gpu_ranks import drive, keep_pace, late, launch, virtual_group
from graph_tools import capture
from op_bodies import messages
from rank_tools import expect
from torch import Tensor
from user_kernel import HandOn, SumRows

import torch_gpusync
from torch_gpusync import (
    SyncError,
    SyncGroup,
    SyncMismatchError,
    SyncTimeoutError,
    virtual_buffers,
    virtual_reset,
)

N, CHANNEL = 3, 1
CAPACITY = 5000
_seeds = itertools.count()  # messages() names its buffer by it


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not (os.environ.get("CUDACXX") or shutil.which("nvcc")):
        pytest.fail("this part needs nvcc: put it on PATH, or name it in CUDACXX")
    major, minor = torch.cuda.get_device_capability()
    library = tmp_path_factory.mktemp("kernels") / "libuser.so"
    source = Path(__file__).resolve().parent / "user_kernel.cu"
    build_library(source, f"{major}{minor}", torch_gpusync.include_path(), library)
    bound = user_kernel.bind(str(library))
    user_kernel.check(bound.load())  # now: no rank waits on the GPU yet
    return bound


def sums(kernels: ctypes.CDLL, ranks: Sequence[SyncGroup]) -> list[SumRows]:
    rows = virtual_buffers(ranks, "rows", (2, len(ranks), CAPACITY), torch.float32)
    return [SumRows(kernels, sync, rows[sync.rank], CHANNEL) for sync in ranks]


def on_gpu(x: Tensor) -> Tensor:
    return x.to("cuda")


def inputs(n: int, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """x and bias of every rank, and their sum: whole numbers, so that it is exact. On the CPU."""
    base = torch.arange(n, dtype=torch.float32) % 97
    x = [base + 1000 * r + 7 * seed for r in range(N)]
    bias = [base * 2 + 10 * r + seed for r in range(N)]
    return x, bias, sum((x[r] + bias[r] for r in range(N)), torch.zeros(n))


def check_whole(ranks: Sequence[SyncGroup], sum_rows: Sequence[SumRows], n: int = 1000) -> None:
    """The kernels are right, and so are the group's ops."""
    x, bias, total = inputs(n, n)
    on_device = [(on_gpu(x[r]), on_gpu(bias[r])) for r in range(N)]
    torch.cuda.synchronize()
    for _ in range(3):
        for y in launch(ranks, lambda sync: sum_rows[sync.rank](*on_device[sync.rank])):
            assert y is not None and torch.equal(y.cpu(), total)
    drive(ranks, messages, 5, next(_seeds))
    for sync in ranks:
        sync.check()


def is_poisoned(y: Tensor | None) -> bool:
    return y is not None and bool(y.cpu().isnan().all())


def test_rounds_of_every_size_among_ops_of_the_same_channel(kernels: ctypes.CDLL) -> None:
    """Launches of 1 to 20 blocks, one after the other, with ranks that are late; and now and then the channel's own ops."""
    rounds = 200
    with virtual_group(N) as ranks:
        sum_rows = sums(kernels, ranks)
        sizes = [(1, 300, CAPACITY, 77, 2500)[k % 5] for k in range(rounds)]
        cases = [inputs(n, k) for k, n in enumerate(sizes)]
        on_device = [[(on_gpu(x[r]), on_gpu(bias[r])) for x, bias, _ in cases] for r in range(N)]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            results = []
            for k in range(rounds):
                if (k + sync.rank) % 3 == 0:
                    late(100)
                results.append(sum_rows[sync.rank](*on_device[sync.rank][k]))
                if k % 7 == 3:  # all are done with their half: it may be used again
                    sync.barrier(CHANNEL)
                    sync.push_exit(CHANNEL)
                if k % 7 == 5:
                    sync.pull_start(CHANNEL)
                keep_pace(sync, k)
            return results

        for results in drive(ranks, body):
            for k, y in enumerate(results):
                assert torch.equal(y.cpu(), cases[k][2]), f"round {k}"
        check_whole(ranks, sum_rows)


def test_signals_pass_between_kernels_and_ops(kernels: ctypes.CDLL) -> None:
    """Around the ring: rank 0's ops put and signal, the others' kernels wait, add one and signal, rank 0's op waits."""
    rounds = 100
    with virtual_group(N) as ranks:
        buffers = virtual_buffers(ranks, "message", (1,), torch.int32)
        hand_on = [HandOn(kernels, sync, buffers[sync.rank], CHANNEL) for sync in ranks]
        numbers = [on_gpu(torch.tensor([1000 * k], dtype=torch.int32)) for k in range(rounds)]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            results = []
            for k in range(rounds):
                if (k + sync.rank) % 3 == 0:
                    late(50)
                if sync.rank == 0:
                    buffers[0].put(numbers[k], 1)
                    sync.signal(1, CHANNEL)
                    sync.wait_signal(N - 1, CHANNEL)
                    results.append(buffers[0].get())
                else:
                    hand_on[sync.rank](sync.rank - 1, (sync.rank + 1) % N)
                keep_pace(sync, k)
            return results

        got = drive(ranks, body)[0]
        assert [int(y) for y in got] == [1000 * k + N - 1 for k in range(rounds)]


def test_in_a_graph(kernels: ctypes.CDLL) -> None:
    """Fresh data at every replay, with kernels and ops of one channel in one graph, and eager launches in between."""
    n = 3000
    with virtual_group(N) as ranks:
        sum_rows = sums(kernels, ranks)
        x = [torch.zeros(n).cuda() for _ in range(N)]
        bias = [torch.zeros(n).cuda() for _ in range(N)]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            first = sum_rows[sync.rank](x[sync.rank], bias[sync.rank])
            sync.barrier(CHANNEL)
            late(30 * sync.rank)
            return [first, sum_rows[sync.rank](first, bias[sync.rank])]

        graph, results = capture(ranks, body)
        for k in range(100):
            new_x, new_bias, total = inputs(n, k)
            for r in range(N):
                x[r].copy_(new_x[r])
                bias[r].copy_(new_bias[r])
            torch.cuda.synchronize()
            if k % 10 == 9:
                eager = launch(ranks, lambda sync: sum_rows[sync.rank](x[sync.rank], bias[sync.rank]))
                assert all(y is not None and torch.equal(y.cpu(), total) for y in eager)
            graph.replay()
            torch.cuda.synchronize()
            second = sum((total + new_bias[r] for r in range(N)), torch.zeros(n))
            for outputs in results:
                assert torch.equal(outputs[0].cpu(), total), f"replay {k}"
                assert torch.equal(outputs[1].cpu(), second), f"replay {k}"
        for sync in ranks:
            sync.check()


def test_a_rank_that_does_not_come_and_a_reset(kernels: ctypes.CDLL) -> None:
    with virtual_group(N) as ranks:
        sum_rows = sums(kernels, ranks)
        check_whole(ranks, sum_rows)
        x, bias, _ = inputs(1000, 1)
        on_device = [(on_gpu(x[r]), on_gpu(bias[r])) for r in range(N)]
        torch.cuda.synchronize()

        def call(sync: SyncGroup) -> Tensor:
            return sum_rows[sync.rank](*on_device[sync.rank])

        for sync in ranks:
            sync.timeout = 0.4
        start = time.monotonic()
        outputs = launch(ranks, call, absent=[2])
        assert 0.4 <= time.monotonic() - start < 1.4
        assert all(is_poisoned(y) for y in outputs), "values of a given-up wait look right"
        for sync in ranks:
            error = expect(
                SyncTimeoutError,
                "user_kernel\\(group='.*, channel=1, call \\d+, key=1000\\).* waited 0\\.[4-9] s for rank 2 ",
                sync.check,
            )
            assert (error.op, error.channel, error.missing_ranks) == ("user_kernel", CHANNEL, [2])
        start = time.monotonic()
        assert all(is_poisoned(y) for y in launch(ranks, call)), "a kernel of a broken group passed"
        assert time.monotonic() - start < 0.3, "a kernel of a broken group waits"
        handles = [sync.device_handle(CHANNEL) for sync in ranks]
        assert handles == [each.handle for each in sum_rows]
        for sync in ranks:
            sync.timeout = 20.0
        virtual_reset(ranks)
        check_whole(ranks, sum_rows)


@pytest.mark.parametrize("what", ["key", "blocks", "op"])
def test_ranks_that_call_different_things(kernels: ctypes.CDLL, what: str) -> None:
    with virtual_group(N) as ranks:
        sum_rows = sums(kernels, ranks)
        check_whole(ranks, sum_rows)
        x, bias, _ = inputs(1001, 1)
        on_device = [(on_gpu(x[r]), on_gpu(bias[r])) for r in range(N)]
        shorter = [(a[:1000], b[:1000]) for a, b in on_device]
        torch.cuda.synchronize()

        def call(sync: SyncGroup) -> Tensor | None:
            late(50_000)  # until the hosts of all ranks have made their calls
            if sync.rank != 1:
                return sum_rows[sync.rank](*shorter[sync.rank])
            if what == "op":
                sync.barrier(CHANNEL)
                return None
            if what == "key":
                return sum_rows[1](*on_device[1])
            return sum_rows[1](*shorter[1], blocks=2)

        start = time.monotonic()
        outputs = launch(ranks, call)
        assert time.monotonic() - start < 2.0
        assert all(y is None or is_poisoned(y) for y in outputs)
        # A kernel's call is known where it has arrived, and the third rank need not have.
        other = {"key": "key=1001, blocks=4", "blocks": "key=1000, blocks=2", "op": "barrier"}[what]
        for sync in ranks:
            error = expect(SyncMismatchError, "does not match", sync.check)
            assert any("user_kernel(key=1000, blocks=4, fence=True)" in call for call in error.calls), (
                error.calls
            )
            assert other in error.calls[1], error.calls
        virtual_reset(ranks)
        check_whole(ranks, sum_rows)


def test_too_many_blocks_are_refused(kernels: ctypes.CDLL) -> None:
    """By the kernel, before it touches what lies beyond its own semaphores and counters: other channels work on."""
    with virtual_group(N) as ranks:
        sum_rows = sums(kernels, ranks)
        check_whole(ranks, sum_rows)
        x, bias, total = inputs(CAPACITY, 1)
        on_device = [(on_gpu(x[r]), on_gpu(bias[r])) for r in range(N)]
        torch.cuda.synchronize()
        max_blocks = struct.unpack_from("=5I", sum_rows[0].handle)[4]
        assert 1 <= max_blocks <= 128
        for y in launch(ranks, lambda sync: sum_rows[sync.rank](*on_device[sync.rank], blocks=max_blocks)):
            assert y is not None and torch.equal(y.cpu(), total)
        [y] = launch(ranks, lambda sync: sum_rows[1](*on_device[1], blocks=max_blocks + 1), absent=[0, 2])
        assert is_poisoned(y)
        for sync in ranks:
            expect(SyncError, "push_epoch\\(group=.* rank 1 .*more than max_blocks blocks", sync.check)
        virtual_reset(ranks)
        check_whole(ranks, sum_rows)


def test_handles_and_pointers(kernels: ctypes.CDLL) -> None:
    with virtual_group(N, channels=2) as ranks:
        rows = virtual_buffers(ranks, "rows", (2, N, CAPACITY), torch.float32)
        addresses = [buffer.device_pointers() for buffer in rows]
        assert addresses == [addresses[0]] * N and len(set(addresses[0])) == N  # one process: one mapping
        assert not any(address % 128 for address in addresses[0])
        handles = [sync.device_handle(channel) for sync in ranks for channel in (0, 1)]
        assert len(set(handles)) == 2 * N and len({len(handle) for handle in handles}) == 1
        for channel in (2, -1):
            expect(SyncError, "channel", ranks[0].device_handle, channel)
        sum_rows = SumRows(kernels, ranks[0], rows[0])
        x = on_gpu(torch.ones(10))
        good = sum_rows.handle
        for wrong in (good[:-1], good + b"\0", struct.pack("=I", 2) + good[4:]):
            sum_rows.handle = wrong
            expect(RuntimeError, "device handle of version .*include_path", sum_rows, x, x)
        ranks[0].close()
        expect(SyncError, "closed", ranks[0].device_handle)
        expect(SyncError, "closed", rows[0].device_pointers)

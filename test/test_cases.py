"""Failures that users of such code have met elsewhere, as tests by number: those that no other file has a place for.

docs/proof.md lists all of them, with the report that each comes from.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from rank_tools import check_health, close_all, expect, learn, slack, tell
from reference_data import DTYPES, assert_same_bits, bits, input_of, reduce_in_rank_order

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, memory, virtual_buffers
from torch_gpusync.testing import executed_ops, ranks, run_ranks, run_threads

ALGOS = ["pull_one_shot", "pull_two_shot", "push_one_shot"]


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_06_every_bit_pattern_of_16_bit_types(dtype: torch.dtype, algo: str) -> None:
    """A sum with -0.0, and the maximum and minimum of equals, give the pattern back; NaN stays NaN. put and get copy
    bits: no value means "not there yet"."""
    patterns = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    nothing = torch.full((65536,), -0.0, dtype=dtype)
    groups = torch_gpusync.virtual_ranks(3, timeout=60.0)
    buffers = virtual_buffers(groups, "patterns", (65536,), dtype)

    def body(rank: int) -> None:
        sync = groups[rank]
        for owner in range(3):
            assert_same_bits(sync.all_reduce(patterns if rank == owner else nothing, "sum", algo), patterns)
        for reduce_op in ("max", "min"):
            assert_same_bits(sync.all_reduce(patterns, reduce_op, algo), patterns)
        buffers[rank].put(patterns, (rank + 1) % 3)
        sync.barrier()
        assert torch.equal(bits(buffers[rank].get()), bits(patterns))

    run_threads(body, 3)
    close_all(groups)


def _one_is_stopped(rank: int, rounds: int) -> list[list[float]]:
    """Rank 2 is stopped and continued at any moment, also while it reads what the others have staged."""
    sync = SyncGroup(buffer_bytes=1 << 14, timeout=60.0)
    tell(f"pid {rank}", str(os.getpid()))
    pid, over = int(learn("pid 2")), threading.Event()

    def disturb() -> None:
        draw = random.Random(7)
        while not over.is_set():
            time.sleep(draw.uniform(0.0, 0.003))
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.0, 0.003))
            os.kill(pid, signal.SIGCONT)

    sync.barrier()
    helper = threading.Thread(target=disturb)
    if rank == 0:
        helper.start()
    stamps = []
    try:
        for k in range(rounds):
            x = torch.full((2000,), float(3 * k + rank))
            began = time.monotonic()
            y = sync.all_reduce(x, algo=ALGOS[k % 3])
            stamps.append([began, time.monotonic()])
            x.fill_(float("nan"))
            assert torch.equal(y, torch.full((2000,), 9.0 * k + 3)), (k, y)
    finally:
        over.set()
        if rank == 0:
            helper.join()
    return stamps


def test_case_07_a_fast_rank_is_a_call_ahead_of_a_slow_one() -> None:
    stamps = run_ranks(_one_is_stopped, 3, 1500, timeout=120)
    ahead = sum(stamps[0][k + 1][0] < stamps[2][k][1] for k in range(1499))
    assert ahead > 10, f"rank 0 was a call ahead {ahead} times only"


def _alternate(rank: int, calls: int) -> None:
    """Any algorithm and size after any other, on one set of counters; small whole numbers, which all types hold."""
    sync = SyncGroup(buffer_bytes=1 << 13, timeout=60.0)
    draw = random.Random(11)
    for k in range(calls):
        algo = draw.choice(["auto", *ALGOS])
        numel = draw.choice((0, 1, 3, 64, 511, 513, 1500))
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.int32))
        reduce_op = draw.choice(("sum", "max"))
        y = sync.all_reduce(torch.full((numel,), k % 40 + 2 * rank, dtype=dtype), reduce_op, algo)
        expected = 3 * (k % 40) + 6 if reduce_op == "sum" else k % 40 + 4
        assert (y == expected).all(), (k, algo, numel, dtype, reduce_op, y)
        if draw.random() < 0.1:
            sync.barrier(k % 3)


def test_case_11_algorithms_and_sizes_alternate() -> None:
    run_ranks(_alternate, 3, 10_000, timeout=120)


def _filled_with_nan(rank: int) -> None:
    """With every new tensor full of NaN, or of the largest integer, results are the same."""
    sync = SyncGroup(buffer_bytes=1 << 13, timeout=60.0)
    buffer = sync.buffer("b", (40,), torch.float32)

    def step(x: torch.Tensor) -> torch.Tensor:
        buffer.put(x * 2)
        sync.barrier()
        y = buffer.get((sync.rank + 1) % 3)
        sync.barrier()
        return sync.all_reduce(y) + x

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(5).isnan().all() and (torch.empty(5, dtype=torch.int32) == 2**31 - 1).all()
    for number, dtype in enumerate(DTYPES):
        for algo in ALGOS:
            for numel in (1, 65, 3000):
                inputs = [input_of(r, numel, dtype, number) for r in range(3)]
                assert_same_bits(
                    sync.all_reduce(inputs[rank], "sum", algo), reduce_in_rank_order(inputs, "sum")
                )
    for k in range(4):
        for function in (compiled, step):
            seen = function(torch.full((40,), float(k + rank)))
            assert torch.equal(seen, torch.full((40,), 7.0 * k + 6 + rank)), (k, seen)
    assert sync.push_epoch().item() == 0


def test_case_17_uninitialised_memory_is_never_read() -> None:
    run_ranks(_filled_with_nan, 3, timeout=120)


@ranks(3, timeout=200)
def test_case_18_the_first_compiled_calls_run_every_op_as_eager_ones_do(sync: SyncGroup, rank: int) -> None:
    """Compiling, warm-up and all that comes later: the same ops, and this call's data."""
    buffer = sync.buffer("b", (4, 4), torch.float32)

    def step(x: torch.Tensor) -> torch.Tensor:
        buffer.put(x @ x)
        sync.barrier()
        y = buffer.get((rank + 1) % 3)
        sync.barrier(1)
        return sync.all_reduce(y.relu())

    def check(function: Any, k: int) -> list[str]:
        with executed_ops() as log:
            y = function(torch.full((4, 4), float(k + rank)))
        assert torch.equal(y, torch.full((4, 4), float(sum(4 * (k + r) ** 2 for r in range(3))))), (k, y)
        return [str(op) for op in log]

    eager = check(step, 0)
    assert len(eager) == 5
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        for k in range(1, 6):
            assert check(compiled, k) == eager, (backend, k)


def _other_memory(rank: int, wrong: int) -> None:
    """What one rank is offered as the group's memory leads somewhere else there."""
    identity = memory._identity

    def elsewhere(file: int | str) -> list[int]:
        # Rank 0 looks at what it has made by descriptor; the others, by path, at what they are offered.
        return identity("/proc/self/exe") if rank == wrong and isinstance(file, str) else identity(file)

    memory._identity = elsewhere
    start = time.monotonic()
    pattern = rf"cannot map one another's memory \(rank {wrong}: .* is another file there; rank {wrong}: "
    expect(SyncError, pattern, SyncGroup, timeout=20.0)
    assert time.monotonic() - start < 5.0 * slack()
    memory._identity = identity
    check_health(SyncGroup(timeout=20.0))


@pytest.mark.parametrize("wrong", [0, 2])
def test_case_20_memory_that_leads_elsewhere_is_a_clear_error(wrong: int) -> None:
    run_ranks(_other_memory, 3, wrong)


def test_case_23_staging_of_every_capacity_and_inputs_at_every_start() -> None:
    """Sizes around what one part takes, at every start that an element can have in 16 bytes."""
    for capacity in range(8192, 8192 + 256, 16):
        groups = torch_gpusync.virtual_ranks(3, buffer_bytes=capacity, timeout=60.0)
        half = -(-capacity // 2 // 128) * 128
        cases = [
            (algo, dtype, half // dtype.itemsize + extra, start)
            for algo in ALGOS
            for dtype in (torch.bfloat16, torch.float32)
            for start, extra in enumerate((-1, 0, 1, -2, 9, 2, -7, 3)[: 16 // dtype.itemsize])
        ]
        whole = [
            [input_of(r, start + numel, dtype, seed) for r in range(3)]
            for seed, (_, dtype, numel, start) in enumerate(cases)
        ]

        def body(
            rank: int,
            groups: list[SyncGroup] = groups,
            cases: list[Any] = cases,
            whole: list[list[torch.Tensor]] = whole,
        ) -> list[torch.Tensor]:
            return [
                groups[rank].all_reduce(x[rank][start:], algo=algo)
                for x, (algo, _, _, start) in zip(whole, cases, strict=True)
            ]

        of_ranks = run_threads(body, 3)
        for x, (_, _, _, start), *results in zip(whole, cases, *of_ranks, strict=True):
            expected = reduce_in_rank_order([part[start:] for part in x], "sum")
            for y in results:
                assert_same_bits(y, expected)
        close_all(groups)


def _back_to_back(rank: int, calls: int) -> None:
    """State that is reused too early shows as another call's sum."""
    sync = SyncGroup(timeout=60.0)
    inputs = [torch.full((8,), float(k + 100 * rank)) for k in range(64)]
    for block in range(calls // 1000):
        kept = [sync.all_reduce(inputs[k % 64]) for k in range(block * 1000, block * 1000 + 1000)]
        sums = torch.stack(kept)
        expected = 3.0 * (torch.arange(block * 1000, block * 1000 + 1000) % 64) + 300
        assert torch.equal(sums, expected[:, None].expand(1000, 8)), block


def test_case_37_collectives_with_no_work_between() -> None:
    run_ranks(_back_to_back, 3, 100_000, timeout=150)

"""Every op, eager, on virtual ranks: a thread and a stream each. The bodies run on CPU groups too (see conftest.py)."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import ON_GPU, drive, virtual_group
from op_bodies import (
    ALGOS,
    COPIED_DTYPES,
    Case,
    assert_same_bytes,
    copies,
    every_offset,
    exchanges,
    layouts,
    messages,
    mixture,
    overwritten,
    pushes,
    reductions,
    signals,
)
from rank_tools import expect
from reference_data import DTYPES, assert_same_bits

from torch_gpusync import SyncError, SyncGroup, virtual_buffers


@pytest.mark.parametrize(("n", "rounds"), [(3, 300), (8, 80), (32, 12)])
def test_case_01_15_messages_around_barriers(n: int, rounds: int) -> None:
    with virtual_group(n) as ranks:
        drive(ranks, messages, rounds)


@pytest.mark.parametrize(("n", "rounds"), [(3, 200), (8, 40), (32, 5)])
def test_signals(n: int, rounds: int) -> None:
    with virtual_group(n) as ranks:
        drive(ranks, signals, rounds)


@pytest.mark.parametrize(("n", "calls"), [(3, 120), (8, 30)])
def test_push_through_both_halves(n: int, calls: int) -> None:
    with virtual_group(n) as ranks:
        drive(ranks, pushes, calls)


def test_put_and_get_of_any_dtype_layout_and_place() -> None:
    with virtual_group(3) as ranks:
        drive(ranks, copies, 6, COPIED_DTYPES)


def _cases(numels: tuple[int, ...]) -> list[Case]:
    """Every dtype, op and algorithm with every size; starts that are at multiples of 16 bytes, and others."""
    return [
        Case(dtype, reduce_op, numel, number % 3, algo)
        for dtype in DTYPES
        for reduce_op in ("sum", "max", "min", *(["avg"] if dtype.is_floating_point else []))
        for algo in ALGOS
        for number, numel in enumerate(numels)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 32])
def test_all_reduce_is_the_rank_order_reduction_bit_for_bit(n: int) -> None:
    """In one part, and in many: the staging buffer's half takes 4096 bytes here."""
    with virtual_group(n, buffer_bytes=8192) as ranks:
        digests = drive(ranks, reductions, _cases((1, 7, 515, 2049, 6000) if n < 32 else (1025,)))
        assert len(set(digests)) == 1


def test_all_reduce_of_large_tensors() -> None:
    """Many blocks, and more than one part of 2 MiB."""
    with virtual_group(3) as ranks:
        cases = [
            Case(dtype, "sum", 1_500_001, 1, algo)
            for dtype in (torch.float32, torch.bfloat16)
            for algo in ALGOS
        ]
        assert len(set(drive(ranks, reductions, [*cases, Case(torch.int64, "max", 70_000)]))) == 1


@pytest.mark.parametrize("buffer_bytes", [1, 2, 100, 2048])
def test_all_reduce_through_the_smallest_staging_buffers(buffer_bytes: int) -> None:
    for n in (3, 20):
        with virtual_group(n, buffer_bytes=buffer_bytes) as ranks:
            cases = [
                Case(dtype, "sum", numel, 0, algo)
                for dtype in (torch.float64, torch.bfloat16)
                for algo in ALGOS
                for numel in (1, 2, 300)
            ]
            assert len(set(drive(ranks, reductions, cases))) == 1


def test_all_reduce_takes_every_layout() -> None:
    with virtual_group(3) as ranks:
        drive(ranks, layouts)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_the_other_collectives_bit_for_bit(n: int) -> None:
    with virtual_group(n, buffer_bytes=1 << 14) as ranks:
        drive(ranks, exchanges, (1, 7, 515, 6000) if n < 8 else (7, 515))
    with virtual_group(n) as ranks:
        drive(ranks, exchanges, (3, 515, 50_000) if n < 8 else (3, 515), 1)


@pytest.mark.parametrize(("n", "calls"), [(3, 10_000), (8, 500)])
def test_case_11_12_any_op_after_any_other(n: int, calls: int) -> None:
    with virtual_group(n, buffer_bytes=1 << 14) as ranks:
        drive(ranks, mixture, calls if ON_GPU else calls // 10, 7)


@pytest.mark.parametrize("algo", ALGOS[1:])
@pytest.mark.parametrize("numel", [1000, 200_000])
def test_case_04_inputs_are_overwritten_right_after_the_call(numel: int, algo: str) -> None:
    with virtual_group(3) as ranks:
        drive(ranks, overwritten, 40, numel, algo)


def test_case_12_empty_calls_advance_nothing() -> None:
    with virtual_group(3) as ranks:
        before = [int(sync.token.item()) for sync in ranks]

        def body(sync: SyncGroup) -> None:
            for shape in ((0,), (3, 0), (0, 0, 5)):
                y = sync.all_reduce(torch.ones(shape, dtype=torch.bfloat16, device=sync.device))
                assert y.shape == torch.Size(shape) and y.dtype == torch.bfloat16

        drive(ranks, body)
        if ON_GPU:
            assert [int(sync.token.item()) for sync in ranks] == before
        drive(ranks, messages, 5)


@pytest.mark.parametrize("algo", ALGOS[1:])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_06_every_bit_pattern_of_16_bit_types(dtype: torch.dtype, n: int, algo: str) -> None:
    """A sum with -0.0, and the maximum and minimum of equals, give the pattern back; NaN stays NaN. put and get
    copy bits."""
    patterns = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    with virtual_group(n) as ranks:
        device = ranks[0].device
        all_patterns, nothing = patterns.to(device), torch.full((65536,), -0.0, dtype=dtype).to(device)
        buffers = virtual_buffers(ranks, "patterns", (65536,), dtype)

        def body(sync: SyncGroup) -> None:
            inputs = [all_patterns if sync.rank == owner else nothing for owner in range(n)]
            results = [sync.all_reduce(x, "sum", algo) for x in inputs]
            results += [sync.all_reduce(all_patterns, reduce_op, algo) for reduce_op in ("max", "min")]
            buffers[sync.rank].put(all_patterns, (sync.rank + 1) % n)
            sync.barrier()
            copied = buffers[sync.rank].get()
            for y in results:
                assert_same_bits(y.cpu(), patterns)
            assert_same_bytes(copied, patterns)

        drive(ranks, body)


@pytest.mark.parametrize("first", [2048, 2304])
def test_case_23_every_capacity_of_the_staging_buffer_and_every_start(first: int) -> None:
    """Sizes around what one part takes, at every offset of 2 bytes from a multiple of 16."""
    for capacity in range(first, first + 256, 16):
        with virtual_group(3, buffer_bytes=capacity) as ranks:
            half = -(-capacity // 2 // 128) * 128
            cases = []
            for algo, part in (
                ("pull_one_shot", half),
                ("pull_two_shot", half),
                ("push_one_shot", half // 3 // 16 * 8),
            ):
                for dtype in (torch.bfloat16, torch.float32):
                    full = part // dtype.itemsize
                    numels = (1, full - 1, full, full + 1, 3 * full + 5, 64, 7, 200)
                    cases += [Case(dtype, "sum", numel, start, algo) for start, numel in enumerate(numels)]
            drive(ranks, reductions, cases)


def test_case_23_27_every_capacity_of_a_buffer_and_every_start() -> None:
    with virtual_group(3) as ranks:
        drive(ranks, every_offset, list(range(16, 129, 16)))


@pytest.mark.parametrize("epoch", [0xFFFFFFF0, 0x7FFFFFF8])
def test_case_09_counters_wrap_around(epoch: int) -> None:
    with virtual_group(3) as ranks:
        preset = torch.ops.gpusync._cuda_preset if ON_GPU else torch.ops.gpusync._preset
        for sync in ranks:
            preset(sync.name, epoch if epoch < 2**31 else epoch - 2**32)
        drive(ranks, messages, 80)
        drive(ranks, signals, 60)
        drive(ranks, pushes, 40)
        drive(ranks, reductions, _cases((5, 3000)))


def test_case_27_channels_ranks_and_offsets_at_their_limits() -> None:
    """The highest accepted, the next rejected; the margins around pads and buffers stay as they are."""
    with virtual_group(3, channels=5) as ranks:
        buffers = virtual_buffers(ranks, "edge", (7,), torch.int32)

        def body(group: SyncGroup) -> None:
            me, buffer = group.rank, buffers[group.rank]
            value = torch.full((1,), me + 1, dtype=torch.int32).to(group.device)
            group.barrier(4)
            group.pull_start(4)
            group.pull_end(4)
            group.push_exit(4)
            group.signal(2, 4)
            if me == 2:
                for src in range(3):
                    group.wait_signal(src, 4)
            buffer.put(value, 2, 6 - me)
            group.barrier(4)
            assert buffer.get(2, (3,), 4).tolist() == [3, 2, 1]
            assert buffer.get(2, (0,), 7).numel() == 0
            for call, text in (
                (lambda: group.barrier(5), "channel"),
                (lambda: group.barrier(-1), "channel"),
                (lambda: group.pull_start(5), "channel"),
                (lambda: group.push_exit(5), "channel"),
                (lambda: group.signal(0, 5), "channel"),
                (lambda: group.wait_signal(0, 5), "channel"),
                (lambda: group.signal(3), "rank"),
                (lambda: group.signal(-1), "rank"),
                (lambda: group.wait_signal(3), "rank"),
                (lambda: buffer.put(value, 3), "rank"),
                (lambda: buffer.get(-2), "rank"),
                (lambda: buffer.put(value, 0, 7), "does not fit"),
                (lambda: buffer.put(value, 0, -1), "does not fit"),
                (lambda: buffer.get(0, (2,), 6), "does not fit"),
                (lambda: buffer.get(0, (8,)), "does not fit"),
                (lambda: buffer.get(0, (1 << 40,)), "does not fit"),
            ):
                expect(SyncError, text, call)
            group.barrier()
            assert buffer.get(2).tolist() == [0, 0, 0, 0, 3, 2, 1]

        drive(ranks, body)

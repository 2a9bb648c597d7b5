"""Every op on the CPU, eager: what it computes, whom it waits for, what its gradient is.

Waiting is checked against the clock, which all processes of a machine share: nobody may leave a barrier
before the last has come. Data differ by rank, round and element, so that a stale or misplaced copy shows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_tools import check_health, close_all, expect, learn, slack, tell

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, SyncTimeoutError
from torch_gpusync.nn.functional import copy_to_ranks, reduce_from_ranks
from torch_gpusync.testing import run_ranks, run_threads

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that -0.0 and NaN are compared too."""
    return x.contiguous().view(_BITS[x.dtype.itemsize])


@pytest.fixture
def three() -> Iterator[list[SyncGroup]]:
    ranks = torch_gpusync.virtual_ranks(3, timeout=20.0)
    yield ranks
    close_all(ranks)


# ---- barriers and stages

_MEETINGS: list[Callable[[SyncGroup], None]] = [
    lambda sync: sync.barrier(),
    lambda sync: sync.barrier(fence=False),
    lambda sync: sync.pull_start(),
    lambda sync: sync.pull_start(),  # a second start waits again
    lambda sync: sync.pull_end(),
    lambda sync: sync.pull_end(fence=True),
    lambda sync: sync.pull_end(),  # a lone end waits
    lambda sync: sync.barrier(7),
    lambda sync: sync.pull_start(3),
]


def _meet_at_random(rank: int, seed: int, rounds: int) -> list[tuple[float, float]]:
    sync = SyncGroup(timeout=20.0)
    choice, delay = random.Random(seed), random.Random(seed * 1000 + rank)
    stamps = []
    for _ in range(rounds):
        meeting = choice.choice(_MEETINGS)
        if delay.random() < 0.3:
            time.sleep(delay.random() * 0.004)
        came = time.monotonic()
        meeting(sync)
        stamps.append((came, time.monotonic()))
    return stamps


def assert_nobody_left_early(stamps: list[list[tuple[float, float]]]) -> None:
    for number, meeting in enumerate(zip(*stamps, strict=True)):
        last_to_come = max(came for came, _ in meeting)
        first_to_leave = min(left for _, left in meeting)
        assert first_to_leave >= last_to_come, f"meeting {number}: {meeting}"


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_nobody_leaves_a_barrier_before_all_have_come(world_size: int) -> None:
    assert_nobody_left_early(run_ranks(_meet_at_random, world_size, 17, 400))


def _stages(rank: int) -> list[tuple[float, float]]:
    """Each call is a barrier of its own: a rank that is late each time is waited for each time."""
    sync = SyncGroup(timeout=20.0)
    stamps = []
    for meeting in (sync.pull_start, sync.pull_start, sync.pull_end, sync.pull_end, sync.pull_start):
        if rank == 2:
            time.sleep(0.1)
        came = time.monotonic()
        meeting()
        stamps.append((came, time.monotonic()))
    return stamps


def test_two_starts_wait_twice_and_a_lone_end_waits_once() -> None:
    stamps = run_ranks(_stages, 3)
    assert_nobody_left_early(stamps)
    waits = [left - came for came, left in stamps[0]]
    assert all(wait > 0.05 for wait in waits), waits


def _messages(rank: int, rounds: int) -> None:
    """Case 1: what a rank wrote before a barrier is what all ranks read after it."""
    sync = SyncGroup(timeout=20.0)
    board = sync.buffer("board", (sync.world_size, 2), torch.int64)
    n = sync.world_size
    for k in range(rounds):
        for peer in range(n):
            board.put(torch.tensor([k, k * 31 + rank]), rank=peer, offset=2 * rank)
        sync.barrier()
        expected = torch.tensor([[k, k * 31 + r] for r in range(n)])
        assert torch.equal(board.get(), expected), (k, board.get())
        sync.barrier(1, fence=False)  # nobody writes the next round before all have read this one


def test_case_01_messages_around_barriers() -> None:
    run_ranks(_messages, 3, 3000)


def test_channels_do_not_mix(three: list[SyncGroup]) -> None:
    """Two threads a rank, each on a channel of its own and late in its own way."""

    def body(index: int) -> list[tuple[float, float]]:
        rank, channel = index % 3, index // 3
        delay, stamps = random.Random(index), []
        for _ in range(150):
            if delay.random() < 0.2:
                time.sleep(delay.random() * 0.003)
            came = time.monotonic()
            three[rank].barrier(channel)
            stamps.append((came, time.monotonic()))
        return stamps

    stamps = run_threads(body, 6)
    assert_nobody_left_early(stamps[:3])
    assert_nobody_left_early(stamps[3:])


def test_a_signal_does_not_wait_for_another_threads_barrier(three: list[SyncGroup]) -> None:
    """Rank 0 waits in a barrier; its other thread sends, on the same channel, what rank 1 waits for."""

    def body(index: int) -> None:
        if index == 3:
            time.sleep(0.05)  # the barrier of rank 0 is under way
            three[0].signal(1)
        else:
            if index == 1:
                three[1].wait_signal(0)
            three[index].barrier()

    run_threads(body, 4, timeout=10)


# ---- signals


def _signals(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)
    n = sync.world_size
    for peer in range(n):  # to everybody, myself too: 5 + rank on channel 1, 2 on channel 2
        for _ in range(5 + rank):
            sync.signal(peer, 1)
        for _ in range(2):
            sync.signal(peer, channel=2)
    for src in reversed(range(n)):
        for _ in range(2):
            sync.wait_signal(src, 2)
        for _ in range(5 + src):
            sync.wait_signal(src, 1)
    # One more of any of them does not come, however many others do.
    sync.signal((rank + 1) % n, 3)
    sync.barrier()
    sync.timeout = 0.5
    start = time.monotonic()
    if rank == 1:
        error = expect(SyncTimeoutError, r"waited \d\.\d s for rank 2 ", sync.wait_signal, 2, 1)
        assert 0.5 <= time.monotonic() - start < 1.5 * slack()
        assert (error.op, error.channel, error.missing_ranks) == ("wait_signal", 1, [2])
        assert error.group == "world" and 0.5 <= error.waited_s < 1.5 * slack()
        tell("timed out")
    else:
        learn(
            "timed out"
        )  # a rank that waited in a barrier for the one that waits for it would be a mismatch
        error = expect(SyncTimeoutError, "wait_signal.* waited ", sync.barrier)
        assert (error.op, error.channel, error.missing_ranks) == ("wait_signal", 1, [2])


def test_case_28_n_signals_serve_n_waits_and_the_next_one_times_out() -> None:
    run_ranks(_signals, 3)


def _waits_first(rank: int) -> float:
    """A wait that is there before its signal; and signals carry the data written before them."""
    sync = SyncGroup(timeout=20.0)
    mail = sync.buffer("mail", (1,), torch.int64)
    n = sync.world_size
    waited = 0.0
    for k in range(300):
        if rank == k % n:
            if k % 50 == 0:
                time.sleep(0.02)
            mail.put(torch.tensor([k * k]), rank=(rank + 1) % n)
            sync.signal((rank + 1) % n)
        elif rank == (k + 1) % n:
            start = time.monotonic()
            sync.wait_signal(k % n)
            waited = max(waited, time.monotonic() - start)
            assert mail.get().item() == k * k
            sync.signal(k % n, 1)  # it may be overwritten
        if rank == k % n:
            sync.wait_signal((rank + 1) % n, 1)
    return waited


def test_signals_carry_what_was_written_before() -> None:
    assert max(run_ranks(_waits_first, 3)) > 0.01


# ---- push


def _push(rank: int, calls: int, halves: int) -> list[int]:
    """All ranks send to all in every call, one reads late; returns the calls in which it read wrongly."""
    sync = SyncGroup(timeout=20.0)
    n, width = sync.world_size, 40
    inbox = sync.buffer("inbox", (2, n, width), torch.int64)
    wrong = []
    for k in range(calls):
        half = sync.push_epoch(2)
        assert half.dtype == torch.int32 and half.dim() == 0 and half.item() == k % 2
        used = int(half) if halves == 2 else 0
        for peer in range(n):
            data = torch.arange(width) + 1000 * k + 100000 * rank + 7 * peer
            inbox.put(data, rank=peer, offset=(used * n + rank) * width)
            sync.signal(peer)
        for src in range(n):
            sync.wait_signal(src)
        if rank == 2 and k % 5 == 3:
            time.sleep(0.01)
        expected = torch.stack([torch.arange(width) + 1000 * k + 100000 * src + 7 * rank for src in range(n)])
        if not torch.equal(inbox.get(size=(n, width), offset=used * n * width), expected):
            wrong.append(k)
        sync.push_exit(2)
    return wrong


def test_push_moves_data_through_both_halves_with_one_rank_delayed() -> None:
    assert run_ranks(_push, 3, 100, 2) == [[], [], []]


def test_push_through_one_half_is_caught_by_the_same_check() -> None:
    wrong = run_ranks(_push, 3, 40, 1)
    assert set(range(3, 39, 5)) <= set(wrong[2]), wrong


# ---- put and get


def _put_and_get(rank: int, seed: int) -> None:
    sync = SyncGroup(timeout=20.0)
    n, numel = sync.world_size, 60
    choice = random.Random(seed)  # the same on all ranks: each knows what all do
    for number, dtype in enumerate(
        [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.float64]
    ):
        buffer = sync.buffer(f"b{number}", (3, 4, 5), dtype)
        assert (buffer.name, buffer.shape, buffer.dtype) == (f"b{number}", torch.Size((3, 4, 5)), dtype)
        model = torch.zeros(n, numel, dtype=dtype)
        assert torch.equal(buffer.get(), model[rank].view(3, 4, 5))
        sync.barrier()
        for k in range(20):
            for writer in range(n):
                target = choice.choice([-1, *range(n)])
                length = choice.choice([0, 1, 2, 6, 12])
                offset = choice.randrange(numel - length + 1)
                source = _strided(choice, length, dtype, 50 * k + writer)
                if rank == writer:
                    before = source.clone()
                    buffer.put(source, target, offset)
                    assert torch.equal(source, before)
                model[writer if target == -1 else target, offset : offset + length] = source.reshape(-1)
                sync.barrier()
        reader = random.Random(rank + 100 * number)
        for _ in range(30):
            source_rank = reader.choice([-1, *range(n)])
            size = reader.choice([(), (3,), (2, 0, 4), (2, 3), (60,), (1, 2, 2, 1)])
            length = torch.Size(size).numel()
            offset = reader.randrange(numel - length + 1)
            got = buffer.get(source_rank, size, offset)
            expected = model[source_rank if source_rank >= 0 else rank, offset : offset + length].reshape(
                size
            )
            assert got.shape == torch.Size(size) and torch.equal(got, expected)
            got.fill_(1)  # a copy: it does not reach the buffer
        assert torch.equal(buffer.get(), model[rank].view(3, 4, 5))
        sync.barrier()


def _strided(choice: random.Random, length: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    values = (torch.arange(2 * max(length, 1)) * 3 + salt) % 120
    base = values % 2 == 0 if dtype == torch.bool else values.to(dtype)
    kind = choice.randrange(4)
    if kind == 0:
        return base[:length]
    if kind == 1:
        return base[::2][:length]
    if kind == 2:
        return base[:1].expand(length)
    return base[:length].view(length // 2, 2).t() if length % 2 == 0 else base[:length].view(length, 1)


def test_put_and_get_offsets_strides_and_ranks() -> None:
    run_ranks(_put_and_get, 3, 5)


def test_put_and_get_have_no_gradient(three: list[SyncGroup]) -> None:
    def body(rank: int) -> None:
        buffer = three[rank].buffer("b", (4,), torch.float32)
        x = torch.ones(4, requires_grad=True)
        buffer.put(x * 2)
        got = buffer.get()
        assert not got.requires_grad and got.tolist() == [2.0] * 4

    run_threads(body, 3)


def test_offsets_in_a_tensor_mean_the_same(three: list[SyncGroup]) -> None:
    def body(rank: int) -> None:
        sync = three[rank]
        buffer = sync.buffer("b", (10,), torch.int32)
        ops = torch.ops.gpusync
        for offset in (0, 3, 8):
            where = torch.tensor(offset)
            ops.put.tensor_offset(
                sync.token, sync.name, "b", torch.tensor([offset, rank], dtype=torch.int32), -1, where
            )
            assert ops.get.tensor_offset(sync.token, sync.name, "b", -1, [2], where).tolist() == [
                offset,
                rank,
            ]
        assert buffer.get().tolist() == [0, rank, 0, 3, rank, 0, 0, 0, 8, rank]
        for wrong in (9, -1):
            expect(
                RuntimeError,
                "does not fit",
                ops.get.tensor_offset,
                sync.token,
                sync.name,
                "b",
                -1,
                [2],
                torch.tensor(wrong),
            )
        half = torch.tensor(1.5)
        expect(RuntimeError, "one int64", ops.get.tensor_offset, sync.token, sync.name, "b", -1, [2], half)
        check_health(sync)

    run_threads(body, 3)


# ---- all_reduce

_SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-40,
    -1e-40,
    5.9e-8,
    -6e-8,
    65504.0,
    3.0e38,
    1.0,
]


def _inputs(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same for a given rank wherever it is made. Every pair of special values meets in some element."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        x = torch.randint(info.min, info.max, (numel,), dtype=dtype, generator=generator)
        x[::7] = [info.max, info.min, 0, -1][rank % 4]
        return x
    x = (torch.randn(numel, generator=generator, dtype=torch.float64) * 10).to(dtype)
    special = torch.tensor(_SPECIAL, dtype=torch.float64).to(dtype)
    index = torch.arange(numel)
    chosen = special[(index // len(_SPECIAL) ** (rank % 3)) % len(_SPECIAL)]
    return torch.where(index % 2 == 0, x, chosen)


def _reference(inputs: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """In rank order; the 16-bit types in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = inputs[0].to(wide)
    for x in inputs[1:]:
        x = x.to(wide)
        if reduce_op == "sum":
            result = result + x
        else:
            better = x > result if reduce_op == "max" else x < result
            result = torch.where(better | (x != x), x, result)
    return result.to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN may have any payload, for its sum has no standard one."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(actual), nan)
    wrong = (bits(actual) != bits(expected)) & ~nan.reshape(bits(expected).shape)
    assert not wrong.any(), f"{wrong.sum()} elements, first {wrong.reshape(-1).nonzero()[0].item()}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_reduce_is_the_rank_order_reduction_bit_for_bit(world_size: int) -> None:
    """Also beyond the staging buffer: its half takes 4096 bytes here, 512 to 2048 elements."""
    ranks = torch_gpusync.virtual_ranks(world_size, buffer_bytes=8192, timeout=20.0)
    cases = [
        (dtype, reduce_op, numel)
        for dtype in DTYPES
        for reduce_op in ("sum", "max", "min")
        for numel in (1, 3, 17, 511, 512, 513, 2048, 2049, 6000)
    ]
    inputs = [
        [_inputs(r, numel, dtype, seed) for r in range(world_size)]
        for seed, (dtype, _, numel) in enumerate(cases)
    ]

    def body(rank: int) -> list[torch.Tensor]:
        return [
            ranks[rank].all_reduce(inputs[number][rank], reduce_op, "auto" if number % 2 else "pull_one_shot")
            for number, (_, reduce_op, _) in enumerate(cases)
        ]

    kept = [[x.clone() for x in xs] for xs in inputs]
    results = run_threads(body, world_size)
    for number, (_, reduce_op, _) in enumerate(cases):
        expected = _reference(inputs[number], reduce_op)
        for r in range(world_size):
            assert_same_bits(results[r][number], expected)
            assert torch.equal(bits(results[r][number]), bits(results[0][number]))  # NaN payloads too
            assert torch.equal(bits(inputs[number][r]), bits(kept[number][r]))
    close_all(ranks)


def test_all_reduce_takes_every_layout(three: list[SyncGroup]) -> None:
    base = [torch.arange(2 * 3 * 4 * 5, dtype=torch.float32) * (r + 1) + r for r in range(3)]
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x[0],  # 0-d
        lambda x: x.view(2, 60).t(),
        lambda x: x[::3],
        lambda x: x.view(2, 3, 4, 5)[:, 1:, ::2, 3],
        lambda x: x.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda x: x[7:8].expand(6, 1),
        lambda x: x[:5].view(5, 1).expand(5, 4),
        lambda x: torch.flip(x.view(10, 12), (0,)),
        lambda x: x.view(2, 3, 4, 5).permute(3, 1, 0, 2),
        lambda x: x[3:][:0].view(0, 4),
    ]

    def body(rank: int) -> None:
        for layout in layouts:
            x = layout(base[rank])
            y = three[rank].all_reduce(x)
            expected = sum(layout(each) for each in base)
            assert y.is_contiguous() and torch.equal(y, torch.as_tensor(expected))
            assert y.numel() == 0 or y.data_ptr() != x.data_ptr()

    run_threads(body, 3)


def _mixture(rank: int, seed: int, rounds: int) -> None:
    """Any dtype, op and size after any other, empty ones too, with no work between."""
    sync = SyncGroup(buffer_bytes=1 << 14, timeout=20.0)
    choice = random.Random(seed)
    for k in range(rounds):
        dtype, reduce_op = choice.choice(DTYPES), choice.choice(("sum", "max", "min"))
        numel = choice.choice((0, 1, 2, 9, 100, 1024, 1025, 5000))
        inputs = [_inputs(r, numel, dtype, k) for r in range(sync.world_size)]
        assert_same_bits(sync.all_reduce(inputs[rank], reduce_op), _reference(inputs, reduce_op))


def test_case_12_collectives_of_any_kind_in_any_order() -> None:
    run_ranks(_mixture, 3, 3, 600)


def test_case_04_a_peers_input_may_be_overwritten_right_after_the_call(three: list[SyncGroup]) -> None:
    def body(rank: int) -> None:
        x = torch.empty(1000)
        for k in range(200):
            x.fill_(k + rank)
            y = three[rank].all_reduce(x)
            x.fill_(float("nan"))
            if rank == 1 and k % 20 == 0:
                time.sleep(0.005)
            assert torch.equal(y, torch.full((1000,), 3.0 * k + 3))

    run_threads(body, 3)


def test_case_12_empty_calls_advance_nothing(three: list[SyncGroup]) -> None:
    def body(rank: int) -> None:
        sync = three[rank]
        check_health(sync)
        before = torch.ops.gpusync._calls(sync.name)
        for shape in ((0,), (3, 0), (0, 0, 5)):
            y = sync.all_reduce(torch.ones(shape, dtype=torch.bfloat16))
            assert y.shape == torch.Size(shape) and y.dtype == torch.bfloat16
        assert torch.ops.gpusync._calls(sync.name) == before
        check_health(sync, 1)

    run_threads(body, 3)


@pytest.mark.parametrize("epoch", [0xFFFFFFF0, 0x7FFFFFF8])
def test_case_09_counters_wrap_around(three: list[SyncGroup], epoch: int) -> None:
    for sync in three:
        torch.ops.gpusync._preset(sync.name, epoch if epoch < 2**31 else epoch - 2**32)

    def body(rank: int) -> list[tuple[float, float]]:
        stamps, delay = [], random.Random(rank)
        for k in range(40):
            if delay.random() < 0.3:
                time.sleep(0.001)
            came = time.monotonic()
            three[rank].barrier()
            stamps.append((came, time.monotonic()))
            assert three[rank].push_epoch().item() == (epoch + k) % 2
            three[rank].push_exit()
            check_health(three[rank], k)
        return stamps

    assert_nobody_left_early(run_threads(body, 3))


# ---- gradients


def _weights(rank: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).view(3, 4) * (rank + 1) - 5 * rank


_ALL_WEIGHTS = _weights(0) + _weights(1) + _weights(2)


def test_gradient_of_all_reduce_is_the_all_reduce_of_the_gradients(three: list[SyncGroup]) -> None:
    def body(rank: int) -> None:
        x = torch.randn(4, 3, requires_grad=True)
        y = three[rank].all_reduce(x.t() * 2)  # not contiguous
        (y * _weights(rank)).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, 2 * _ALL_WEIGHTS.t())

    run_threads(body, 3)


def test_gradient_of_the_gradient(three: list[SyncGroup]) -> None:
    """loss = sum(all_reduce(x)^2 * w): dloss/dx = all_reduce(2 y w), whose gradient goes through it again."""

    def body(rank: int) -> None:
        x = (torch.arange(12.0).view(3, 4) + rank).requires_grad_()
        y = three[rank].all_reduce(x)
        (grad,) = torch.autograd.grad((y * y * _weights(rank)).sum(), x, create_graph=True)
        total = 3 * torch.arange(12.0).view(3, 4) + 3
        assert torch.equal(grad, 2 * total * _ALL_WEIGHTS)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert torch.equal(second, 6 * _ALL_WEIGHTS)

    run_threads(body, 3)


def test_copy_to_ranks_and_reduce_from_ranks_are_conjugate(three: list[SyncGroup]) -> None:
    def body(rank: int) -> None:
        sync = three[rank]
        x = torch.arange(12.0).view(4, 3).t().requires_grad_()
        y = copy_to_ranks(x, sync)
        assert torch.equal(y, x) and y.is_contiguous()
        (y * _weights(rank)).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, _ALL_WEIGHTS)

        z = (torch.ones(3, 4) * (rank + 1)).requires_grad_()
        total = reduce_from_ranks(z, sync)
        assert torch.equal(total, torch.full((3, 4), 6.0))
        (total * _ALL_WEIGHTS).sum().backward()
        assert z.grad is not None and torch.equal(z.grad, _ALL_WEIGHTS)

    run_threads(body, 3)


def test_column_and_row_parallel_layers_train_like_one(three: list[SyncGroup]) -> None:
    """Megatron's MLP: the gradients of the parts are the parts of the gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    first = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    second = torch.randn(6, 3, generator=generator, dtype=torch.float64)

    whole = [t.clone().requires_grad_() for t in (x, first, second)]
    (torch.tanh(whole[0] @ whole[1]) @ whole[2]).pow(2).sum().backward()

    def body(rank: int) -> list[torch.Tensor | None]:
        part = slice(2 * rank, 2 * rank + 2)
        mine = [t.clone().requires_grad_() for t in (x, first[:, part], second[part])]
        hidden = torch.tanh(copy_to_ranks(mine[0], three[rank]) @ mine[1])
        reduce_from_ranks(hidden @ mine[2], three[rank]).pow(2).sum().backward()
        return [t.grad for t in mine]

    grads = run_threads(body, 3)
    for rank in range(3):
        torch.testing.assert_close(grads[rank][0], whole[0].grad)
    torch.testing.assert_close(torch.cat([g[1] for g in grads], 1), whole[1].grad)
    torch.testing.assert_close(torch.cat([g[2] for g in grads]), whole[2].grad)


def test_what_has_no_gradient_says_so(three: list[SyncGroup]) -> None:
    def body(rank: int) -> None:
        sync = three[rank]
        for reduce_op in ("max", "min"):
            y = sync.all_reduce(torch.ones(3, requires_grad=True), reduce_op)
            expect(RuntimeError, f"no gradient for reduce_op='{reduce_op}': detach", y.sum().backward)
        with torch.no_grad():
            assert not sync.all_reduce(torch.ones(3, requires_grad=True)).requires_grad
        with torch.inference_mode():
            assert sync.all_reduce(torch.ones(3)).tolist() == [3.0] * 3
            sync.barrier()
        assert not sync.all_reduce(torch.ones(3)).requires_grad
        check_health(sync)

    run_threads(body, 3)


def test_modes_and_subclasses_of_tensors(three: list[SyncGroup]) -> None:
    """A Parameter goes in as a tensor does, and what comes out is a plain tensor."""

    def body(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        y = three[rank].all_reduce(weight)
        y.sum().backward()
        assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]
        return type(y)

    assert run_threads(body, 3) == [torch.Tensor] * 3
    close_all(three)
    expect(SyncError, "no group 'virtual.*/0'", three[0].barrier)

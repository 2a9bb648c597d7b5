"""What a rank does in the tests of eager ops (see gpu_ranks.py for what a body may do). Each raises when its rank has seen
anything wrong, and reports what only all ranks together can judge."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu_ranks import keep_pace, late, meet, settle, to_device
from reference_data import DTYPES, assert_same_bits, input_of, random_bytes, reduce_in_rank_order
from torch import Tensor

from torch_gpusync import SyncGroup

COPIED_DTYPES = [
    *DTYPES,
    *(torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
]

ALGOS = ["auto", "pull_one_shot", "pull_two_shot", "push_one_shot"]

MEETINGS: list[Callable[[SyncGroup], None]] = [
    lambda sync: sync.barrier(),
    lambda sync: sync.barrier(fence=False),
    lambda sync: sync.pull_start(),
    lambda sync: sync.pull_start(2),
    lambda sync: sync.pull_end(),
    lambda sync: sync.pull_end(fence=True),
    lambda sync: sync.barrier(7),
]


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor's elements, on the host."""
    return x.cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bytes(actual: Tensor, expected: Tensor, what: object = "") -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    assert torch.equal(raw(actual), raw(expected)), f"{what}: {actual.cpu()} instead of {expected}"


def messages(sync: SyncGroup, rounds: int, seed: int = 0) -> None:
    """What a rank wrote before it met the others is what all ranks read afterwards, whichever way they met and whoever was
    late."""
    n, rank = sync.world_size, sync.rank
    numbers = torch.arange(rounds)
    texts = [torch.stack([numbers, numbers * 31 + r + seed], 1) for r in range(n)]
    mine = to_device(texts[rank])
    board = sync.buffer(f"messages{seed}", (n, 2), torch.int64)
    shared, own = random.Random(seed), random.Random(seed * 1000 + rank)
    seen = []
    for k in range(rounds):
        if own.random() < 0.25:
            late(own.random() * 150)
        for peer in range(n):
            board.put(mine[k], rank=peer, offset=2 * rank)
        shared.choice(MEETINGS)(sync)
        if own.random() < 0.25:
            late(own.random() * 50)
        seen.append(board.get())
        sync.barrier(1, fence=False)  # nobody writes the next round before all have read this one
        keep_pace(sync, k)
    settle(sync)
    for k, got in enumerate(seen):
        expected = torch.stack([text[k] for text in texts])
        assert torch.equal(got.cpu(), expected), f"round {k}: {got.tolist()} instead of {expected.tolist()}"


def signals(sync: SyncGroup, rounds: int) -> None:
    """n signals serve n waits, whichever comes first, to myself too; and they carry what was written before them."""
    n, rank = sync.world_size, sync.rank
    values = to_device(torch.arange(rounds) * 7 + 1000 * rank)
    mail = sync.buffer("mail", (n,), torch.int64)
    for peer in range(n):
        for _ in range(5 + rank):
            sync.signal(peer, 1)
        sync.signal(peer, channel=2)
    for src in reversed(range(n)):
        sync.wait_signal(src, 2)
        for _ in range(5 + src):
            sync.wait_signal(src, 1)
    seen = []
    before, behind = (rank - 1) % n, (rank + 1) % n
    for k in range(rounds):
        if (k + rank) % 5 == 0:
            late(60)
        mail.put(values[k : k + 1], rank=behind, offset=rank)
        sync.signal(behind)
        sync.wait_signal(before)
        seen.append(mail.get(size=(1,), offset=before))
        sync.signal(before, 3)  # it may be written again
        sync.wait_signal(behind, 3)
        keep_pace(sync, k)
    settle(sync)
    assert [int(x.item()) for x in seen] == [7 * k + 1000 * before for k in range(rounds)]


def pushes(sync: SyncGroup, calls: int) -> None:
    """All send to all in every call, through the two halves in turn, with one reader late."""
    n, rank, width = sync.world_size, sync.rank, 40
    data = torch.arange(width) + 1000 * torch.arange(calls)[:, None]
    mine = to_device(data + 100000 * rank)
    inbox = sync.buffer("inbox", (2, n, width), torch.int64)
    halves, seen = [], []
    for k in range(calls):
        halves.append(sync.push_epoch(2))
        for peer in range(n):
            inbox.put(mine[k], rank=peer, offset=(k % 2 * n + rank) * width)
            sync.signal(peer)
        for src in range(n):
            sync.wait_signal(src)
        if rank == 2 and k % 5 == 3:
            late(300)
        seen.append(inbox.get(size=(n, width), offset=k % 2 * n * width))
        sync.push_exit(2)
        keep_pace(sync, k)
    settle(sync)
    assert all(half.dtype == torch.int32 and half.dim() == 0 for half in halves)
    assert [int(half.item()) for half in halves] == [k % 2 for k in range(calls)]
    for k, got in enumerate(seen):
        assert torch.equal(got.cpu(), torch.stack([data[k] + 100000 * src for src in range(n)])), f"call {k}"


def _layout(kind: int, base: Tensor, length: int) -> Tensor:
    """`length` elements of `base` (64 of them), laid out in some way."""
    if kind == 0:
        return base[:length]
    if kind == 1:
        return base[3 : 3 + length]  # rarely at a multiple of 16 bytes
    if kind == 2:
        return base[::2][:length]
    if kind == 3:
        return base[5:6].expand(length)
    if kind == 4 and length % 2 == 0:
        return base[:length].view(length // 2, 2).t()
    return base[1 : 1 + length].view(length, 1)


def copies(sync: SyncGroup, rounds: int, dtypes: list[torch.dtype]) -> None:
    """put and get of any dtype, layout, length, offset and rank against a model on the host."""
    n, numel = sync.world_size, 60
    choice = random.Random(n)  # the same on all ranks: each knows what all do
    plan = []
    for number, dtype in enumerate(dtypes):
        for k in range(rounds * n):
            salt = choice.randrange(100)
            base = ((torch.arange(64) * 3 + salt) % 120).to(torch.int64)
            host = base % 2 == 0 if dtype == torch.bool else base.to(dtype)
            length = choice.choice([0, 1, 2, 6, 12, 16, 25])
            source = (choice.randrange(6), length)
            target, offset = choice.choice([-1, *range(n)]), choice.randrange(numel - length + 1)
            size = choice.choice([(), (3,), (2, 0, 4), (2, 3), (60,), (1, 2, 2, 4)])
            start = choice.randrange(numel - torch.Size(size).numel() + 1)
            plan.append((number, k % n, host, to_device(host), source, target, offset, size, start))
    for *_, device, source, _, _, _, _ in plan:
        _layout(source[0], device, source[1]).contiguous()  # loads torch's kernels
    settle(sync)
    buffers = [sync.buffer(f"copies{number}", (3, 4, 5), dtype) for number, dtype in enumerate(dtypes)]
    seen = []
    for number, writer, _, device, source, target, offset, size, start in plan:
        if sync.rank == writer:
            buffers[number].put(_layout(source[0], device, source[1]), target, offset)
        sync.barrier()
        seen.append([buffers[number].get(r, size, start) for r in range(-1, n)])
        sync.barrier(1, fence=False)
        keep_pace(sync, len(seen))
    settle(sync)
    model = [torch.zeros(n, numel, dtype=dtype) for dtype in dtypes]
    for k, (number, writer, host, _, source, target, offset, size, start) in enumerate(plan):
        parts = model[number]
        parts[writer if target == -1 else target, offset : offset + source[1]] = _layout(
            source[0], host, source[1]
        ).reshape(-1)
        for r, got in zip([sync.rank, *range(n)], seen[k], strict=True):
            expected = parts[r, start : start + torch.Size(size).numel()].reshape(size)
            assert_same_bytes(got, expected, f"{dtypes[number]}, step {k}, rank {r}")


class Case(NamedTuple):
    """An all_reduce: `start` is the first element of the input in its memory."""

    dtype: torch.dtype
    reduce_op: str
    numel: int
    start: int = 0
    algo: str = "auto"


def reference(inputs: list[Tensor], reduce_op: str) -> Tensor:
    """The reduction in rank order, in float32 for the 16-bit types, rounded once."""
    dtype = inputs[0].dtype
    if reduce_op != "avg":
        return reduce_in_rank_order(inputs, reduce_op)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = inputs[0].to(wide)
    for x in inputs[1:]:
        total = total + x.to(wide)
    return (total * torch.tensor(1.0 / len(inputs), dtype=torch.float64).to(wide)).to(dtype)


_REFERENCES = threading.Lock()  # one virtual rank computes them, the others find them


def _inputs_and_result(n: int, case: Case, seed: int) -> tuple[list[Tensor], Tensor]:
    with _REFERENCES:
        return _compute(n, case, seed)


@functools.lru_cache(maxsize=1024)
def _compute(n: int, case: Case, seed: int) -> tuple[list[Tensor], Tensor]:
    inputs = [input_of(r, case.start + case.numel, case.dtype, seed)[case.start :] for r in range(n)]
    return inputs, reference(inputs, case.reduce_op)


def reductions(sync: SyncGroup, cases: list[Case]) -> str:
    """all_reduce against the reduction in rank order, bit for bit; returns a digest of all results."""
    inputs, wanted = zip(
        *(_inputs_and_result(sync.world_size, case, k) for k, case in enumerate(cases)), strict=True
    )
    mine = []
    for xs, case in zip(inputs, cases, strict=True):
        memory = to_device(torch.zeros(case.start + case.numel, dtype=case.dtype))
        memory[case.start :].copy_(xs[sync.rank])
        mine.append(memory[case.start :])
    settle(sync)
    meet(sync)
    results = []
    for number, (x, case) in enumerate(zip(mine, cases, strict=True)):
        results.append(sync.all_reduce(x, case.reduce_op, case.algo))
        if number % 3 == 2:
            settle(sync)  # some take a hundred launches
    settle(sync)
    digest = hashlib.sha256()
    for y, expected, xs, case, x in zip(results, wanted, inputs, cases, mine, strict=True):
        try:
            assert_same_bits(y.cpu(), expected)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
        assert_same_bytes(x, xs[sync.rank], "the input was changed")
        # A NaN may have another payload on another rank: adding two of them keeps that of either.
        content = raw(y.masked_fill(y.isnan(), float("nan")) if y.is_floating_point() else y)
        digest.update(ctypes.string_at(content.data_ptr(), content.numel()))
    return digest.hexdigest()


def exchanges(sync: SyncGroup, sizes: tuple[int, ...], start: int = 0) -> None:
    """The other collectives, between all_reduces that use the same staging memory, bit for bit. The inputs begin `start`
    elements into their memory."""
    n, rank = sync.world_size, sync.rank
    plan = [(dtype, rows) for dtype in COPIED_DTYPES for rows in sizes]
    hosts = [
        [random_bytes(r, dtype, n * rows, seed=k) for r in range(n)] for k, (dtype, rows) in enumerate(plan)
    ]
    mine = []
    for xs in hosts:
        memory = to_device(torch.zeros(start + xs[0].numel(), dtype=xs[0].dtype))
        memory[start:].view(torch.uint8).copy_(xs[rank].view(torch.uint8))
        mine.append(memory[start:])
    numbers = [input_of(r, n * max(sizes), torch.float32, 5) for r in range(n)]
    x = to_device(numbers[rank])
    total, smallest = reduce_in_rank_order(numbers, "sum"), reduce_in_rank_order(numbers, "min")
    settle(sync)
    meet(sync)
    seen = []
    for k, y in enumerate(mine):
        root = k % n
        if k % 7 == rank:
            late(100)
        seen.append([sync.all_gather(y), sync.all_to_all(y), sync.broadcast(y, root)])
        seen[-1] += [sync.all_reduce(x), sync.reduce_scatter(x, "min"), sync.reduce(x, root)]
        settle(sync)
    part = slice(rank * max(sizes), (rank + 1) * max(sizes))
    for k, (gathered, exchanged, broadcast, summed, scattered, reduced) in enumerate(seen):
        xs, rows = hosts[k], plan[k][1]
        assert_same_bytes(gathered, torch.cat(xs), plan[k])
        assert_same_bytes(exchanged, torch.cat([y.view(n, rows)[rank] for y in xs]), plan[k])
        assert_same_bytes(broadcast, xs[k % n], plan[k])
        assert_same_bits(summed.cpu(), total)
        assert_same_bits(scattered.cpu(), smallest[part])
        assert_same_bits(reduced.cpu(), total if rank == k % n else torch.zeros_like(total))


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[0],  # 0-d
    lambda x: x.view(2, 60).t(),
    lambda x: x[::3],
    lambda x: x[1:],
    lambda x: x.view(2, 3, 4, 5)[:, 1:, ::2, 3],
    lambda x: x.view(2, 3, 4, 5).permute(0, 2, 3, 1),
    lambda x: x[7:8].expand(6, 1),
    lambda x: x[:5].view(5, 1).expand(5, 4),
    lambda x: x[3:][:0].view(0, 4),
]


def layouts(sync: SyncGroup) -> None:
    """all_reduce of any strides; the result is contiguous and memory of its own."""
    base = [torch.arange(120, dtype=torch.float32) * (r + 1) + r for r in range(sync.world_size)]
    inputs = [layout(to_device(base[sync.rank])) for layout in LAYOUTS]
    for x in inputs:
        x.contiguous()  # loads torch's kernels
    settle(sync)
    meet(sync)
    results = [sync.all_reduce(x) for x in inputs]
    settle(sync)
    for layout, x, y in zip(LAYOUTS, inputs, results, strict=True):
        expected = torch.stack([layout(each) for each in base]).sum(0)
        assert y.is_contiguous() and torch.equal(y.cpu(), expected)
        assert y.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def mixture(sync: SyncGroup, calls: int, seed: int) -> None:
    """Any op after any other: dtypes, reductions and sizes of the collectives (empty ones too), channels, stages, signals."""
    n, rank, longest = sync.world_size, sync.rank, 5000
    inputs = {dtype: [input_of(r, longest + 8, dtype, seed) for r in range(n)] for dtype in DTYPES}
    mine = {dtype: to_device(xs[rank]) for dtype, xs in inputs.items()}
    numbers = to_device(torch.arange(calls) * n + rank)
    board = sync.buffer("mixture", (1,), torch.int64)
    choice, own = random.Random(seed), random.Random(seed * 1000 + rank)
    pending: list[tuple[Tensor, Tensor]] = []

    @functools.cache
    def result(dtype: torch.dtype, reduce_op: str, start: int, numel: int) -> Tensor:
        return reduce_in_rank_order([x[start : start + numel] for x in inputs[dtype]], reduce_op)

    def compare() -> None:
        settle(sync)
        for y, expected in pending:
            assert_same_bits(y.cpu(), expected)
        pending.clear()

    for k in range(calls):
        kind = choice.randrange(13)
        if own.random() < 0.02:
            late(own.random() * 200)
        if kind < 6:
            dtype, reduce_op = choice.choice(DTYPES), choice.choice(("sum", "max", "min"))
            numel, start = choice.choice((0, 1, 2, 9, 100, 1024, 1025, longest)), choice.randrange(8)
            y = sync.all_reduce(mine[dtype][start : start + numel], reduce_op, choice.choice(ALGOS))
            pending.append((y, result(dtype, reduce_op, start, numel)))
        elif kind == 6:
            channel, fence = choice.randrange(1, 8), choice.random() < 0.5
            sync.barrier(channel, fence)
        elif kind == 7:
            sync.pull_start(choice.randrange(3))
            sync.pull_end(choice.randrange(3), choice.random() < 0.5)
        elif kind == 8:
            sync.signal((rank + 1) % n, 4)
            sync.wait_signal((rank - 1) % n, 4)
        elif kind < 12:
            dtype, rows, start = (
                choice.choice(DTYPES),
                choice.choice((1, 3, 100, 257, 5000 // n)),
                choice.randrange(8),
            )
            xs = [x[start : start + n * rows] for x in inputs[dtype]]
            y = mine[dtype][start : start + n * rows]
            if kind == 9:
                pending.append((sync.all_gather(y[:rows]), torch.cat([x[:rows] for x in xs])))
            elif kind == 10:
                pending.append((sync.all_to_all(y), torch.cat([x.view(n, rows)[rank] for x in xs])))
            else:
                total = result(dtype, "sum", start, n * rows)
                pending.append((sync.reduce_scatter(y), total.view(n, rows)[rank]))
        else:
            peer = (rank + choice.randrange(n)) % n
            board.put(numbers[k : k + 1])
            sync.barrier()
            pending.append((board.get(peer), torch.tensor([k * n + peer])))
            sync.barrier(0, fence=False)
        if len(pending) >= 40:
            compare()
    compare()


def overwritten(sync: SyncGroup, rounds: int, numel: int, algo: str) -> None:
    """An input may be overwritten right after the call, though a peer reads it late."""
    rank, n = sync.rank, sync.world_size
    table = [torch.arange(numel, dtype=torch.float32) % 50 + k for k in range(rounds)]
    mine = [to_device(row + rank) for row in table]
    garbage = to_device(torch.full((numel,), float("nan")))
    x = to_device(torch.zeros(numel))
    settle(sync)
    meet(sync)
    results = []
    for k in range(rounds):
        x.copy_(mine[k])
        if (k + rank) % n == 0:
            late(100)
        results.append(sync.all_reduce(x, algo=algo))
        x.copy_(garbage)
    settle(sync)
    for k, y in enumerate(results):
        assert torch.equal(y.cpu(), n * table[k] + n * (n - 1) / 2), f"round {k}"


def every_offset(sync: SyncGroup, capacities: list[int]) -> None:
    """Buffers of every capacity, written from every start; what is beside the part stays as it was."""
    n, rank = sync.world_size, sync.rank
    before, behind = (rank - 1) % n, (rank + 1) % n
    data = [(torch.arange(max(capacities) + 16) * 7 + 40 * r).to(torch.uint8) for r in range(n)]
    mine = to_device(data[rank])
    buffers = [sync.buffer(f"b{capacity}", (capacity,), torch.uint8) for capacity in capacities]
    seen = []
    for capacity, buffer in zip(capacities, buffers, strict=True):
        for start in range(capacity):
            for length in {1, capacity - start}:
                buffer.put(mine[start % 16 : start % 16 + length], rank=behind, offset=start)
                sync.barrier()
                seen.append(buffer.get(size=(capacity - start // 2,), offset=start // 2))
                sync.barrier(fence=False)
                keep_pace(sync, len(seen))
    settle(sync)
    results = iter(seen)
    for capacity in capacities:
        model = torch.zeros(capacity, dtype=torch.uint8)
        for start in range(capacity):
            for length in {1, capacity - start}:
                model[start : start + length] = data[before][start % 16 : start % 16 + length]
                got = next(results).cpu()
                assert torch.equal(got, model[start // 2 :]), (
                    f"capacity {capacity}, start {start}, length {length}"
                )

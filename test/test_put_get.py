"""put and get on the CPU, eager: which elements of whose part of a buffer they copy."""

from __future__ import annotations

import random

import torch
from rank_tools import check_health, expect

from torch_gpusync import SyncGroup
from torch_gpusync.testing import run_ranks, run_threads


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

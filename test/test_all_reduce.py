"""all_reduce on the CPU, eager: the bits that it computes, and its gradient."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_tools import check_health, close_all, expect
from reference_data import DTYPES, assert_same_bits, bits, input_of, reduce_in_rank_order

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup
from torch_gpusync.nn.functional import copy_to_ranks, reduce_from_ranks
from torch_gpusync.testing import run_ranks, run_threads

# ---- values


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
        [input_of(r, numel, dtype, seed) for r in range(world_size)]
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
        expected = reduce_in_rank_order(inputs[number], reduce_op)
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
        inputs = [input_of(r, numel, dtype, k) for r in range(sync.world_size)]
        assert_same_bits(sync.all_reduce(inputs[rank], reduce_op), reduce_in_rank_order(inputs, reduce_op))


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

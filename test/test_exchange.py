"""all_gather, reduce_scatter, broadcast, reduce, all_to_all on the CPU, eager. test_compile.py has them compiled."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from rank_tools import close_all, expect
from reference_data import DTYPES, assert_same_bits, input_of, random_bytes, reduce_in_rank_order
from torch import Tensor

import torch_gpusync
from torch_gpusync import SyncGroup, SyncMismatchError
from torch_gpusync.testing import run_ranks, run_threads

MORE_DTYPES = [torch.bool, torch.uint8, torch.int16, torch.complex64, torch.complex128, torch.float8_e5m2]
# Beyond the staging memory: a half holds 4096 bytes here.
SIZES = (1, 2, 3, 5, 341, 342, 1024, 3000)


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.is_contiguous()
        and torch.equal(a.reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_data_arrive_bit_for_bit(n: int) -> None:
    ranks = torch_gpusync.virtual_ranks(n, buffer_bytes=8192, timeout=20.0)

    def body(rank: int) -> None:
        sync = ranks[rank]
        for seed, dtype in enumerate([*DTYPES, *MORE_DTYPES]):
            for rows in SIZES:
                inputs = [random_bytes(r, dtype, rows, 2, seed=seed) for r in range(n)]
                assert _same(sync.all_gather(inputs[rank]), torch.cat(inputs)), (dtype, rows)
                src = (seed + rows) % n
                assert _same(sync.broadcast(inputs[rank], src), inputs[src]), (dtype, rows)
                inputs = [random_bytes(r, dtype, n * rows, seed=seed) for r in range(n)]
                wanted = torch.cat([x.view(n, rows)[rank] for x in inputs])
                assert _same(sync.all_to_all(inputs[rank]), wanted), (dtype, rows)

    run_threads(body, n)
    close_all(ranks)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_reductions_have_the_bits_of_all_reduce(n: int) -> None:
    ranks = torch_gpusync.virtual_ranks(n, buffer_bytes=8192, timeout=20.0)

    def body(rank: int) -> None:
        sync = ranks[rank]
        for dtype in DTYPES:
            for rows in SIZES:
                inputs = [input_of(r, n * rows, dtype, rows) for r in range(n)]
                for op in ("sum", "max", "min", *(("avg",) if dtype.is_floating_point else ())):
                    whole = sync.all_reduce(inputs[rank], op)
                    if op != "avg":
                        assert_same_bits(whole, reduce_in_rank_order(inputs, op))
                    part = sync.reduce_scatter(inputs[rank], op)
                    assert _same(part, whole[rank * rows : (rank + 1) * rows]), (dtype, rows, op)
                    dst = rows % n
                    at_dst = sync.reduce(inputs[rank], dst, op)
                    assert _same(at_dst, whole if rank == dst else torch.zeros_like(whole)), (dtype, rows, op)

    run_threads(body, n)
    close_all(ranks)


def test_every_layout_is_taken() -> None:
    n = 3
    ranks = torch_gpusync.virtual_ranks(n, timeout=20.0)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.view(20, 6).t(),
        lambda x: x[::4],
        lambda x: x.view(6, 4, 5)[:, 1:, ::2],
        lambda x: x[7:8].expand(6, 2),
        lambda x: torch.flip(x.view(12, 10), (0, 1)),
    ]

    def body(rank: int) -> None:
        sync = ranks[rank]
        for layout in layouts:
            inputs = [layout(torch.arange(120.0) + 1000 * r) for r in range(n)]
            x = inputs[rank]
            kept = x.clone()
            rows = x.shape[0] // n
            assert _same(sync.all_gather(x), torch.cat(inputs))
            assert _same(sync.broadcast(x, 1), inputs[1])
            assert _same(sync.reduce_scatter(x), torch.stack(inputs).sum(0)[rank * rows :][:rows])
            assert _same(sync.all_to_all(x), torch.cat([y[rank * rows :][:rows] for y in inputs]))
            assert torch.equal(x, kept)

    run_threads(body, n)
    close_all(ranks)


def _in_any_order(rank: int, rounds: int) -> None:
    """All collectives share two staging halves: any of them may follow any other, however late a rank is."""
    n = 3
    sync = SyncGroup(buffer_bytes=8192, timeout=30.0)
    common, mine = random.Random(1), random.Random(rank)
    for k in range(rounds):
        rows = common.choice((1, 7, 500, 1500))
        inputs = [torch.arange(n * rows, dtype=torch.int64) * (r + 1) + k for r in range(n)]
        x, total = inputs[rank], torch.stack(inputs).sum(0)
        part = slice(rank * rows, (rank + 1) * rows)
        root = common.randrange(n)
        if mine.random() < 0.1:
            time.sleep(0.002 * mine.random())
        which = common.randrange(6)
        if which == 0:
            assert torch.equal(sync.all_gather(x), torch.cat(inputs)), k
        elif which == 1:
            assert torch.equal(sync.broadcast(x, root), inputs[root]), k
        elif which == 2:
            assert torch.equal(sync.all_to_all(x), torch.cat([y[part] for y in inputs])), k
        elif which == 3:
            assert torch.equal(sync.reduce_scatter(x), total[part]), k
        elif which == 4:
            assert torch.equal(sync.reduce(x, root), total if rank == root else 0 * total), k
        else:
            algo = common.choice(("pull_one_shot", "pull_two_shot", "push_one_shot"))
            assert torch.equal(sync.all_reduce(x, algo=algo), total), k


def test_collectives_follow_one_another_in_any_order() -> None:
    run_ranks(_in_any_order, 3, 2000)


MISMATCHES: dict[str, tuple[Callable[[SyncGroup], object], Callable[[SyncGroup], object], str]] = {
    "op": (
        lambda s: s.all_gather(torch.ones(3)),
        lambda s: s.all_to_all(torch.ones(3)),
        r"all_to_all f32\[3\]",
    ),
    "root": (
        lambda s: s.broadcast(torch.ones(3), 0),
        lambda s: s.broadcast(torch.ones(3), 1),
        r"broadcast f32\[3\]\(rank=1\)",
    ),
    "size": (lambda s: s.all_gather(torch.ones(3)), lambda s: s.all_gather(torch.ones(4)), r"f32\[4\]"),
    "shape": (
        lambda s: s.all_to_all(torch.ones(3, 2)),
        lambda s: s.all_to_all(torch.ones(6, 1)),
        r"all_to_all f32\[6, 1\]",
    ),
    "shape of all_reduce": (
        lambda s: s.all_reduce(torch.ones(3, 2)),
        lambda s: s.all_reduce(torch.ones(2, 3)),
        r"all_reduce f32\[2, 3\]",
    ),
    "dtype of the same size": (
        lambda s: s.broadcast(torch.ones(3, dtype=torch.uint8), 0),
        lambda s: s.broadcast(torch.ones(3, dtype=torch.bool), 0),
        r"broadcast bytes\[3\]",
    ),
    "dtype": (
        lambda s: s.all_to_all(torch.ones(3, dtype=torch.int8)),
        lambda s: s.all_to_all(torch.ones(3, dtype=torch.int16)),
        r"all_to_all bytes\[3\]",
    ),
    "reduce_op": (
        lambda s: s.reduce_scatter(torch.ones(3), "max"),
        lambda s: s.reduce_scatter(torch.ones(3), "min"),
        r"reduce_scatter f32\[3\] min",
    ),
    "empty": (lambda s: s.all_gather(torch.ones(3)), lambda s: _empty_first(s), "all_gather"),
}


def _empty_first(sync: SyncGroup) -> Tensor:
    sync.all_gather(torch.ones(0))
    return sync.all_gather(torch.ones(3))


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_call_different_things_are_told(name: str) -> None:
    most, odd, text = MISMATCHES[name]
    ranks = torch_gpusync.virtual_ranks(3, timeout=20.0)

    def body(rank: int) -> None:
        error = expect(SyncMismatchError, text, odd if rank == 1 else most, ranks[rank])
        assert len(error.calls) == 3

    run_threads(body, 3)
    close_all(ranks)


REFUSED: list[tuple[Callable[[SyncGroup], object], str]] = [
    (lambda s: s.all_gather(torch.tensor(1.0)), r"x has none: pass x.reshape\(1\)"),
    (lambda s: s.all_to_all(torch.tensor(1.0)), r"x has none"),
    (lambda s: s.reduce_scatter(torch.tensor(1.0)), r"x has none"),
    (lambda s: s.all_to_all(torch.ones(4, 3)), "dimension 0, here of 4, into 3 equal parts: pad x"),
    (lambda s: s.reduce_scatter(torch.ones(2, 3)), "dimension 0, here of 2, into 3 equal parts: pad x"),
    (lambda s: s.reduce_scatter(torch.ones(3, dtype=torch.int8)), "reduce_scatter takes float32"),
    (lambda s: s.reduce(torch.ones(3, dtype=torch.int64), 0, "avg"), "reduce has no 'avg' for integers"),
    (lambda s: s.reduce_scatter(torch.ones(3), "mean"), "unknown reduce_op 'mean'"),
    (lambda s: s.broadcast(torch.ones(3), 3), "is out of range: group .* has ranks 0 to 2"),
    (lambda s: s.broadcast(torch.ones(3), -1), "is out of range: group .* has ranks 0 to 2"),
    (lambda s: s.reduce(torch.ones(3), 3), "is out of range: group .* has ranks 0 to 2"),
    (lambda s: s.all_gather(torch.ones(3, device="meta")), "on 'meta' and the token .* on 'cpu'"),
    (
        lambda s: torch.ops.gpusync.all_gather(s.token, s.name, torch.ones(3), 2),
        "expects a group of 2 ranks, and .* has 3: was it made anew",
    ),
    (
        lambda s: torch.ops.gpusync.reduce_scatter(s.token, s.name, torch.ones(4), "sum", 4),
        "expects a group of 4 ranks",
    ),
]


def test_what_cannot_be_done_is_refused_and_changes_nothing() -> None:
    ranks = torch_gpusync.virtual_ranks(3, timeout=20.0)

    def body(rank: int) -> None:
        sync = ranks[rank]
        for call, text in REFUSED:
            with pytest.raises(RuntimeError, match=text):
                call(sync)
        assert sync.all_gather(torch.tensor([float(rank)])).tolist() == [0.0, 1.0, 2.0]
        assert not sync.is_broken

    run_threads(body, 3)
    close_all(ranks)


def test_zero_elements_are_a_no_op() -> None:
    ranks = torch_gpusync.virtual_ranks(3, timeout=20.0)

    def body(rank: int) -> None:
        sync = ranks[rank]
        empty = torch.ones(0, 4)
        assert sync.all_gather(empty).shape == (0, 4) and sync.all_to_all(empty).shape == (0, 4)
        assert sync.reduce_scatter(empty).shape == (0, 4) and sync.reduce(empty, 1).shape == (0, 4)
        assert sync.broadcast(torch.ones(3, 0), 2).shape == (3, 0)
        assert sync.all_gather(torch.ones(2, 0)).shape == (6, 0)
        assert sync.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]

    run_threads(body, 3)
    close_all(ranks)


def test_gradients() -> None:
    """Of the sum of all ranks' losses, each the output times a weight of the rank's own; and a second derivative."""
    n = 3
    ranks = torch_gpusync.virtual_ranks(n, timeout=20.0)
    x = [torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    ops: dict[str, tuple[Callable[[SyncGroup, Tensor], Tensor], Callable[[list[Tensor], int], Tensor]]] = {
        "all_gather": (lambda s, y: s.all_gather(y), lambda ys, r: torch.cat(ys)),
        "all_to_all": (lambda s, y: s.all_to_all(y), lambda ys, r: torch.stack([y[r] for y in ys])),
        "broadcast": (lambda s, y: s.broadcast(y, 1), lambda ys, r: ys[1]),
        "reduce": (lambda s, y: s.reduce(y, 2), lambda ys, r: sum(ys) * (1.0 if r == 2 else 0.0)),
        "reduce avg": (
            lambda s, y: s.reduce(y, 0, "avg"),
            lambda ys, r: sum(ys) * (1 / n if r == 0 else 0.0),
        ),
        "reduce_scatter": (lambda s, y: s.reduce_scatter(y), lambda ys, r: sum(ys)[r : r + 1]),
        "reduce_scatter avg": (lambda s, y: s.reduce_scatter(y, "avg"), lambda ys, r: sum(ys)[r : r + 1] / n),
    }

    def loss(y: Tensor, rank: int) -> Tensor:
        return (y * y * (rank + 1.5)).sum()

    for name, (call, reference) in ops.items():

        def body(rank: int, call: Callable[[SyncGroup, Tensor], Tensor] = call) -> tuple[Tensor, Tensor]:
            mine = x[rank].clone().requires_grad_()
            [first] = torch.autograd.grad(loss(call(ranks[rank], mine.sin()), rank), mine, create_graph=True)
            [second] = torch.autograd.grad((first * first).sum(), mine)
            return first.detach(), second

        found = run_threads(body, n)
        inputs = [y.clone().requires_grad_() for y in x]
        total = sum(loss(reference([y.sin() for y in inputs], r), r) for r in range(n))
        first = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), inputs, materialize_grads=True)
        for r in range(n):
            torch.testing.assert_close(found[r][0], first[r].detach(), msg=f"{name}, rank {r}")
            torch.testing.assert_close(found[r][1], second[r], msg=f"{name}, rank {r}, second")
    close_all(ranks)


@pytest.mark.parametrize("op", ["reduce_scatter", "reduce"])
def test_max_has_no_gradient(op: str) -> None:
    [sync] = torch_gpusync.virtual_ranks(1)
    x = torch.ones(3, requires_grad=True)
    y = sync.reduce_scatter(x, "max") if op == "reduce_scatter" else sync.reduce(x, 0, "max")
    with pytest.raises(RuntimeError, match=f"{op} has no gradient for reduce_op='max': detach its input"):
        y.sum().backward()
    sync.close()


def _transforms(rank: int) -> None:
    n = 3
    sync = SyncGroup(timeout=20.0)
    x = [torch.rand(4, 2 * n, 5, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    mine = x[rank]
    total = torch.stack(x).sum(0)
    over = torch.vmap(sync.all_gather, in_dims=2, out_dims=2)
    torch.testing.assert_close(over(mine), torch.cat(x, dim=0))
    torch.testing.assert_close(torch.vmap(sync.all_gather)(mine), torch.cat(x, dim=1))
    torch.testing.assert_close(torch.vmap(sync.reduce_scatter)(mine), total[:, 2 * rank : 2 * rank + 2])
    torch.testing.assert_close(
        torch.vmap(sync.all_to_all)(mine), torch.cat([y[:, 2 * rank : 2 * rank + 2] for y in x], dim=1)
    )
    torch.testing.assert_close(torch.vmap(lambda y: sync.broadcast(y, 2), in_dims=1, out_dims=1)(mine), x[2])
    with pytest.raises(RuntimeError, match="works along dimension 0, and x has none"):
        torch.vmap(sync.all_gather)(torch.ones(3))
    y, tangent = torch.func.jvp(lambda z: sync.reduce_scatter(z[0], "avg"), (mine,), (2 * mine,))
    torch.testing.assert_close(y, total[0, 2 * rank : 2 * rank + 2] / n)
    torch.testing.assert_close(tangent, 2 * y)
    with pytest.raises(RuntimeError, match="has no gradient for reduce_op='max'"):
        torch.func.jvp(lambda z: sync.reduce(z, 0, "max"), (mine,), (mine,))
    per_example = torch.vmap(torch.func.grad(lambda z: sync.broadcast(z, 1).square().sum()))(mine)
    torch.testing.assert_close(per_example, 2 * n * mine if rank == 1 else 0 * mine)


def test_transforms() -> None:
    """vmap, forward mode, and a gradient inside vmap. (In processes: torch counts levels of forward mode for all threads.)"""
    run_ranks(_transforms, 3)

"""A name that is used again: no graph reaches the old group, and none takes the old group's shapes, dtypes or ranks to
the new one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rank_tools import check_health, expect

from torch_gpusync import SyncError, SyncGroup
from torch_gpusync.testing import run_ranks

Function = Callable[[torch.Tensor], torch.Tensor]


def _shift(model: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    """The left neighbour's x, in the buffer's dtype, and the sum of all: everything that depends on the group."""
    sync, board = model.sync, model.board
    board.put(x.to(board.dtype), rank=(sync.rank + 1) % sync.world_size)
    sync.barrier()
    got = board.get()
    sync.barrier(1)
    return got + sync.all_reduce(x).to(board.dtype)


def _check(model: SimpleNamespace, function: Function, k: int) -> None:
    sync, board = model.sync, model.board
    left, n = (sync.rank - 1) % sync.world_size, sync.world_size
    x = torch.full(board.shape, float(sync.rank + k))
    expected = torch.full(board.shape, left + k + n * (n - 1) // 2 + n * k).to(board.dtype)
    y = function(x)
    assert y.dtype == board.dtype and torch.equal(y, expected), (y, expected)


def _made_anew(rank: int) -> None:
    groups = [None, dist.new_group([1, 2]), None]
    shapes = [(4,), (2, 3), (7,)]
    dtypes = [torch.float32, torch.int64, torch.float64]
    model = SimpleNamespace()

    def step(x: torch.Tensor) -> torch.Tensor:
        return _shift(model, x)

    def of(model: SimpleNamespace) -> Function:
        return lambda x: _shift(model, x)

    looks_up = torch.compile(step, fullgraph=True, backend="inductor")
    stale: list[Function] = []
    for life, (group, shape, dtype) in enumerate(zip(groups, shapes, dtypes, strict=True)):
        if group is not None and rank == 0:
            continue  # this life is without it, and others have another rank in it
        sync = SyncGroup(group, name="tp", timeout=60.0)
        for old in stale:  # holds on to a closed group
            expect(
                torch._dynamo.exc.Unsupported,
                "was closed, and a new one has its name 'tp'",
                old,
                torch.ones(shapes[0]),
            )
        model.sync, model.board = sync, sync.buffer("board", shape, dtype)
        for k in range(2):
            _check(model, looks_up, 10 * life + k)
        if life == 0:
            mine = SimpleNamespace(sync=model.sync, board=model.board)
            stale.append(torch.compile(of(mine), fullgraph=True, backend="inductor"))
            _check(mine, stale[0], 3)
        check_health(sync)
        sync.close()
        expect(torch._dynamo.exc.Unsupported, "this process has no group 'tp'", looks_up, torch.ones(shape))
        expect(SyncError, "no group 'tp'", model.board.get)


def test_a_function_that_was_compiled_for_an_earlier_group_of_the_name() -> None:
    run_ranks(_made_anew, 3, timeout=200)


def _by_name_alone(rank: int) -> None:
    """Graphs without an object: they reach the new group, or say what does not fit it."""
    sync = SyncGroup(name="tp", timeout=60.0)
    token = sync.token
    sync.buffer("b", (4,), torch.float32).put(torch.full((4,), float(rank)))

    def get(x: torch.Tensor) -> torch.Tensor:
        torch.ops.gpusync.barrier(token, "tp")
        return x + torch.ops.gpusync.get(token, "tp", "b", -1, [4], 0, torch.float32)

    def default_get(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ops.gpusync.get(token, "tp", "b")

    compiled = torch.compile(get, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(4)).tolist() == [rank + 1.0] * 4
    careless = torch.compile(default_get, fullgraph=True, backend="aot_eager")
    expect(torch._dynamo.exc.TorchRuntimeError, "pass size and dtype, as", careless, torch.ones(4))
    assert default_get(torch.ones(4)).tolist() == [rank + 1.0] * 4
    for life, (shape, dtype) in enumerate(
        [((9,), torch.float32), ((4,), torch.int32), ((3,), torch.float32)]
    ):
        del sync  # collected
        gc.collect()
        expect(RuntimeError, "this process has no group 'tp'", compiled, torch.ones(4))
        sync = SyncGroup(name="tp", timeout=60.0)
        if life == 2:
            expect(RuntimeError, "group 'tp' has no buffer 'b'", compiled, torch.ones(4))
        sync.buffer("b", shape, dtype).put(torch.full(shape, 10 + rank).to(dtype))
        if life == 0:
            assert compiled(torch.ones(4)).tolist() == [rank + 11.0] * 4
        elif life == 1:
            expect(
                RuntimeError, "another dtype than the buffer has: was it made anew", compiled, torch.ones(4)
            )
        else:
            expect(RuntimeError, "get of 4 elements at offset 0 does not fit", compiled, torch.ones(4))
        check_health(sync)
        dist.barrier()


def test_graphs_that_know_the_name_alone() -> None:
    run_ranks(_by_name_alone, 3, timeout=120)

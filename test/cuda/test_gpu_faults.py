"""Waits end: with an error that names who is missing, with the context and other groups intact, and with no wrong value that
looks right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from gpu_ranks import drive, late, launch, on, virtual_group
from graph_tools import capture, capture_each, replay
from op_bodies import ALGOS, messages
from rank_tools import expect
from reference_data import DTYPES
from torch import Tensor

from torch_gpusync import SyncError, SyncGroup, SyncMismatchError, SyncTimeoutError, virtual_buffers


def poison(dtype: torch.dtype) -> Callable[[Tensor], bool]:
    if dtype == torch.bool:
        return lambda x: bool(x.all())
    if dtype.is_floating_point or dtype.is_complex:
        return lambda x: bool(
            torch.isnan(x.cpu().to(torch.complex128 if dtype.is_complex else torch.float64)).all()
        )
    return lambda x: bool((x == torch.iinfo(dtype).max).all())


def hurry(ranks: Sequence[SyncGroup], seconds: float) -> None:
    """From now on waits end after `seconds`. (Set-up takes its own time, and is bounded by the timeout too.)"""
    for sync in ranks:
        sync.timeout = seconds


def still_works(n: int = 3) -> None:
    """The context, and a new group in it."""
    assert torch.arange(1000, device="cuda").sum().item() == 499500
    with virtual_group(n) as others:
        drive(others, messages, 5)


def _all_reduce(numel: int, algo: str) -> Callable[[SyncGroup], object]:
    return lambda sync: sync.all_reduce(torch.ones(numel, device="cuda"), algo=algo)


EXCHANGES = ("all_gather", "all_to_all", "reduce_scatter")  # pushed, when there is little to send


def _exchange(op: str, numel: int) -> Callable[[SyncGroup], object]:
    return lambda sync: getattr(sync, op)(torch.ones(numel, device="cuda"))


WAITS: dict[str, tuple[Callable[[SyncGroup], object], str, int]] = {
    "barrier": (lambda sync: sync.barrier(3), "barrier", 3),
    "relaxed barrier": (lambda sync: sync.barrier(fence=False), "barrier", 0),
    "pull_start": (lambda sync: sync.pull_start(1), "pull_start", 1),
    "pull_end": (lambda sync: sync.pull_end(2, True), "pull_end", 2),
    **{
        f"{algo} of {numel}": (_all_reduce(numel, algo), "all_reduce", -1)
        for algo in ALGOS[1:]
        for numel in (100, 100_000)
    },
    **{
        f"{op} of {numel}": (_exchange(op, numel), op, -1)
        for op in EXCHANGES
        for numel in (60, 30_000, 600_000)
    },
}


@pytest.mark.parametrize("absent", [(2,), (0, 2, 3, 4)])
@pytest.mark.parametrize("name", WAITS)
def test_case_28_a_wait_ends_and_names_the_missing_ranks(name: str, absent: tuple[int, ...]) -> None:
    call, op, channel = WAITS[name]
    n = 3 if max(absent) < 3 else 5
    with virtual_group(n) as ranks:
        drive(ranks, messages, 3)
        hurry(ranks, 0.4)
        start = time.monotonic()
        outputs = launch(ranks, call, absent)
        waited = time.monotonic() - start
        assert 0.4 <= waited < 1.4, f"the wait took {waited:.2f} s"
        for y in outputs:
            assert y is None or (isinstance(y, Tensor) and y.isnan().all()), (
                "values of a given-up wait look right"
            )
        for sync in ranks:  # the absent ones too
            assert sync.is_broken
            error = expect(
                SyncTimeoutError, f"{op}\\(group='.*waited 0\\.[4-9] s for rank {absent[0]} ", sync.check
            )
            assert (error.op, error.channel, error.missing_ranks) == (op, channel, list(absent))
            assert 0.4 <= error.waited_s < 1.4 and error.group == sync.name
            later = expect(SyncTimeoutError, "is broken", sync.barrier)
            assert later.missing_ranks == list(absent)
            expect(SyncTimeoutError, "is broken", sync.all_reduce, torch.ones(3, device="cuda"))
            assert "call" in sync.dump()
    still_works()


def test_a_rank_that_has_closed_the_group_is_not_waited_for() -> None:
    with virtual_group(3, timeout=60.0) as ranks:
        drive(ranks, messages, 3)
        for sync in ranks[:2]:
            with on(sync):
                sync.barrier()
        start = time.monotonic()
        ranks[2].close()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 20
        for sync in ranks[:2]:
            error = expect(SyncTimeoutError, "has closed the group", sync.check)
            assert error.missing_ranks == [2]
    still_works()


def test_case_28_one_wait_more_than_signals() -> None:
    with virtual_group(3) as ranks:
        hurry(ranks, 0.4)
        for _ in range(4):
            launch(ranks, lambda sync: sync.signal(1, 2))
        with on(ranks[1]):
            for src in range(3):
                for _ in range(4):
                    ranks[1].wait_signal(src, 2)
        torch.cuda.synchronize()
        ranks[1].check()
        with on(ranks[1]):
            ranks[1].wait_signal(2, 2)
        torch.cuda.synchronize()
        for sync in ranks:
            error = expect(SyncTimeoutError, "wait_signal", sync.check)
            assert (error.op, error.channel, error.missing_ranks) == ("wait_signal", 2, [2])
    still_works()


@pytest.mark.parametrize("algo", ALGOS[1:])
@pytest.mark.parametrize("lateness", [0.28, 0.30, 0.32, 0.38])
def test_a_wait_is_given_up_by_all_ranks_or_by_none(lateness: float, algo: str) -> None:
    """Rank 2 comes at about the moment when the others give up: no value is wrong, and all ranks tell the same."""
    with virtual_group(3) as ranks:
        hurry(ranks, 0.3)
        x = [torch.full((70_000,), sync.rank + 1.0, device="cuda") for sync in ranks]

        def call(sync: SyncGroup) -> Tensor:
            if sync.rank == 2:
                late(lateness * 1e6 * 1.32)  # near the clock of an H200; the exact moment does not matter
            return sync.all_reduce(x[sync.rank], algo=algo)

        results = launch(ranks, call)
        broken = [sync.is_broken for sync in ranks]
        assert broken in ([True] * 3, [False] * 3)
        for y in results:
            assert isinstance(y, Tensor)
            right = y == 6  # blocks that had passed before keep what they have
            assert (right | y.isnan() if broken[0] else right).all(), y.unique().tolist()[:4]
        if broken[0]:
            assert expect(SyncTimeoutError, "rank 2", ranks[0].check).missing_ranks == [2]
        else:
            drive(ranks, messages, 5)


@pytest.mark.parametrize("algo", ALGOS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_of_a_given_up_call_are_poisoned(dtype: torch.dtype, algo: str) -> None:
    with virtual_group(3) as ranks:
        hurry(ranks, 0.1)
        x = torch.ones(1003, dtype=dtype, device="cuda")
        for y in launch(ranks, lambda sync: sync.all_reduce(x[1:], algo=algo), absent=[0]):
            assert isinstance(y, Tensor) and y.shape == (1002,) and poison(dtype)(y), y


def _reduce(x: str | int, reduce_op: str = "sum", algo: str = "auto") -> Callable[[SyncGroup], object]:
    return lambda sync: sync.all_reduce(_INPUTS[x], reduce_op, algo)


_OTHERS: dict[str, tuple[str | int, str]] = {
    "numel": (11, "sum"),
    "reduce_op": (10, "max"),
    "dtype": ("integers", "sum"),
}
MISMATCHES: dict[str, list[Callable[[SyncGroup], object]]] = {
    "fence": [lambda sync: sync.barrier(), lambda sync: sync.barrier(fence=False)],
    "stage": [lambda sync: sync.pull_start(), lambda sync: sync.barrier(fence=False)],
    "grid": [_reduce(10), _reduce(200_000)],
    "smaller grid": [_reduce(200_000), _reduce(10)],
    "algo": [_reduce(10, algo="push_one_shot"), _reduce(10, algo="pull_one_shot")],
    "other algo": [_reduce(10, algo="pull_two_shot"), _reduce(10, algo="push_one_shot")],
    **{
        f"{what}, {algo}": [_reduce(10, algo=algo), _reduce(*other, algo=algo)]
        for algo in ALGOS[1:]
        for what, other in _OTHERS.items()
    },
    "rows": [_exchange("all_gather", 12), _exchange("all_gather", 600_000)],
    "exchange": [_exchange("all_to_all", 12), _exchange("reduce_scatter", 12)],
    "exchange or all_reduce": [_exchange("all_gather", 10), _reduce(10, algo="push_one_shot")],
    **{f"grid, {algo}": [_reduce(10_000, algo=algo), _reduce(200_000, algo=algo)] for algo in ALGOS[1:]},
}
_INPUTS: dict[str | int, Tensor] = {}


@pytest.fixture(scope="module", autouse=True)
def _inputs_on_the_gpu() -> None:
    for numel in (10, 11, 12, 10_000, 200_000, 300_000):
        _INPUTS[numel] = torch.ones(numel, device="cuda")
    _INPUTS["integers"] = torch.ones(10, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("name", MISMATCHES)
def test_case_10_ranks_that_call_different_things(name: str) -> None:
    """An error that names what each rank called, long before the timeout; nobody gets a value that looks right."""
    most, one = MISMATCHES[name]
    with virtual_group(3) as ranks:
        drive(ranks, messages, 3)
        start = time.monotonic()

        def call(sync: SyncGroup) -> object:
            late(50_000)  # until the hosts of all ranks have made their calls
            return (one if sync.rank == 1 else most)(sync)

        outputs = launch(ranks, call)
        assert time.monotonic() - start < 2.0
        for y in outputs:
            assert y is None or (isinstance(y, Tensor) and poison(y.dtype)(y)), y
        for sync in ranks:
            error = expect(SyncMismatchError, "does not match", sync.check)
            assert len(error.calls) == 3 and error.calls[0] == error.calls[2] != error.calls[1], error.calls
            expect(SyncMismatchError, "is broken", sync.barrier)
    still_works()


def test_an_empty_call_on_one_rank_is_a_mismatch() -> None:
    with virtual_group(3) as ranks:
        launch(ranks, lambda sync: sync.all_reduce(_INPUTS[10][:0]), absent=[0, 2])

        def call(sync: SyncGroup) -> object:
            late(50_000)
            return _reduce(10)(sync)

        outputs = launch(ranks, call)
        for sync, y in zip(ranks, outputs, strict=True):
            expect(SyncMismatchError, "all_reduce", sync.check)
            assert isinstance(y, Tensor) and y.isnan().all()


# ---- in graphs


def test_a_new_timeout_holds_for_captured_graphs() -> None:
    with virtual_group(3, timeout=600.0) as ranks:
        graphs, _ = capture_each(ranks, lambda sync: sync.barrier())
        replay(ranks, graphs)
        for sync in ranks:
            sync.timeout = 0.3
        start = time.monotonic()
        replay(ranks, graphs, absent=[1])
        assert 0.3 <= time.monotonic() - start < 1.3
        for sync in ranks:
            assert sync.is_broken
            error = expect(SyncTimeoutError, "rank 1", sync.check)
            assert error.missing_ranks == [1] and 0.3 <= error.waited_s < 1.3
    still_works()


def test_replays_of_a_broken_group_return_at_once_with_poison() -> None:
    """Nothing traps: the same graphs of a broken group go on replaying, quickly, and every output says that it is nothing."""
    dtypes = [*DTYPES, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
    with virtual_group(3) as ranks, virtual_group(3) as others:
        names = [virtual_buffers(ranks, str(dtype), (33,), dtype) for dtype in dtypes]
        buffers = [[of_rank[r] for of_rank in names] for r in range(3)]

        def body(sync: SyncGroup) -> list[Tensor]:
            r = sync.rank
            for _ in range(20):
                sync.barrier()
                sync.pull_end()
            for buffer in buffers[r]:
                buffer.put(buffer.get(), (r + 1) % 3)
            sync.signal((r + 1) % 3)
            sync.wait_signal((r - 1) % 3)
            sums = [sync.all_reduce(_INPUTS[300_000], algo=algo) for algo in ALGOS[1:]]
            sums += [getattr(sync, op)(_INPUTS[12]) for op in EXCHANGES]
            return [*sums, *(buffer.get(1) for buffer in buffers[r])]

        graphs, results = capture_each(ranks, body)
        replay(ranks, graphs)
        assert not any(sync.is_broken for sync in ranks)
        for outputs in results:
            for y, value in zip(outputs, (3, 3, 3, 1, 1, 3), strict=False):
                assert (y == value).all()
        assert not any(outputs[6].any() for outputs in results)
        hurry(ranks, 0.3)
        replay(ranks, graphs, absent=[2])
        assert all(sync.is_broken for sync in ranks)
        for _ in range(5):
            for outputs in results:
                for y in outputs:
                    y.zero_()
            torch.cuda.synchronize()
            start = time.monotonic()
            replay(ranks, graphs)
            assert time.monotonic() - start < 0.1, "a replay of a broken group waits"
            for outputs in results:
                for dtype, y in zip([torch.float32] * 6 + dtypes, outputs, strict=True):
                    assert poison(dtype)(y), f"{dtype}: {y}"
        expect(SyncTimeoutError, "rank 2", ranks[0].check)
        drive(others, messages, 10)  # another group goes on beside it
    still_works()


def test_a_complete_call_stays_right_when_the_group_breaks_behind_it() -> None:
    """Rank 1 alone reads in the first call, and is slow. Two collectives on, the others would stage into the same half: in a
    broken group they do not wait for it any more."""
    n, numel = 8, 1 << 20
    first = [torch.randint(-99, 99, (numel,), generator=torch.Generator().manual_seed(r)) for r in range(n)]
    expected = torch.stack(first).sum(0).float()
    inputs = [x.float().cuda() for x in first]
    other, tiny = torch.full((numel,), 1000.0, device="cuda"), torch.ones(1, device="cuda")
    for _ in range(10):
        with virtual_group(n) as ranks:

            def body(sync: SyncGroup) -> Tensor:
                result = sync.reduce(inputs[sync.rank], 1)
                sync.barrier(fence=sync.rank != 2)
                sync.reduce(tiny, 1)
                sync.reduce(other, 1)
                return result

            graph, results = capture(ranks, body)
            graph.replay()
            torch.cuda.synchronize()
            assert all(sync.is_broken for sync in ranks)
            assert torch.equal(results[1].cpu(), expected)
    still_works()


def test_a_mismatch_in_a_replay_is_reported() -> None:
    with virtual_group(3) as ranks:
        graphs, results = capture_each(ranks, lambda sync: sync.all_reduce(_INPUTS[10 + (sync.rank == 2)]))
        start = time.monotonic()
        replay(ranks, graphs)
        assert time.monotonic() - start < 2.0 and all(y.isnan().all() for y in results)
        error = expect(SyncMismatchError, "all_reduce", ranks[0].check)
        assert error.calls[2] != error.calls[0] == error.calls[1], error.calls
    still_works()


@pytest.mark.parametrize("how", ["graph", "eager"])
@pytest.mark.parametrize(
    ("what", "offset"), [("put", 97), ("put", -1), ("get", 98), ("get", -1 << 40), ("get", 1 << 62)]
)
def test_an_offset_outside_breaks_the_group(what: str, offset: int, how: str) -> None:
    """Refused by the kernel, which copies nothing (the margins are checked), says why, and yields poison."""
    with virtual_group(3) as ranks:
        buffers = virtual_buffers(ranks, "b", (100,), torch.float32)
        where = torch.full((), 96, device="cuda")
        x = torch.ones(4, device="cuda")

        def move(sync: SyncGroup) -> Tensor | None:
            buffer, peer = buffers[sync.rank], (sync.rank + 1) % 3
            place: Tensor | int = where if sync.rank == 1 else 0
            if what == "get":
                return buffer.get(peer, (3,), place)
            buffer.put(x, peer, place)
            return None

        def body(sync: SyncGroup) -> Tensor | None:
            got = move(sync)
            sync.barrier()
            return got

        graph, results = capture(ranks, body)
        graph.replay()
        torch.cuda.synchronize()
        assert not any(sync.is_broken for sync in ranks)
        where.fill_(offset)
        torch.cuda.synchronize()
        if how == "graph":
            graph.replay()
            torch.cuda.synchronize()
        else:
            results[1:2] = launch(ranks[1:2], move)
        assert what == "put" or results[1].isnan().all()
        for sync in ranks:
            assert sync.is_broken
            expect(
                SyncError, f"{what}\\(.*rank 1 .*offset, in a device tensor, that lies outside", sync.check
            )
        start = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 0.1
        expect(SyncError, "lies outside", ranks[0].barrier)
        expect(SyncError, "lies outside", ranks[1].barrier)
    still_works()

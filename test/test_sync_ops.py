"""Barriers, stages, signals and the push protocol on the CPU, eager: whom each op waits for.

Waiting is checked against the clock, which all processes of a machine share: nobody may leave a barrier
before the last has come. Data differ by rank, round and element, so that a stale or misplaced copy shows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from rank_tools import check_health, expect, learn, slack, tell

from torch_gpusync import SyncGroup, SyncTimeoutError
from torch_gpusync.testing import run_ranks, run_threads

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


# ---- counters


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

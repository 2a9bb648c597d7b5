"""When a rank is late, stops, dies or leaves, the others are told so and who it is, and in time.

Three processes in most tests: with two, whoever is missing is always "the other".
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_tools import check_health, close_all, expect, learn, slack, tell, timed

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, SyncTimeoutError
from torch_gpusync.testing import Lost, run_ranks, run_threads

TIMEOUT = 0.7
LIMIT = TIMEOUT + 1.0  # seconds after which nobody may still be waiting

WAITS: dict[str, Callable[[SyncGroup], Any]] = {
    "barrier": lambda sync: sync.barrier(),
    "unfenced barrier": lambda sync: sync.barrier(3, fence=False),
    "pull_start": lambda sync: sync.pull_start(1),
    "pull_end": lambda sync: sync.pull_end(2),
    "wait_signal": lambda sync: sync.wait_signal(2, 4),
    "all_reduce": lambda sync: sync.all_reduce(torch.ones(32, 64)),
}
CHANNELS = {
    "barrier": 0,
    "unfenced barrier": 3,
    "pull_start": 1,
    "pull_end": 2,
    "wait_signal": 4,
    "all_reduce": -1,
}


def assert_all_ops_fail_at_once(sync: SyncGroup, error: type[SyncError]) -> None:
    buffer = torch.ops.gpusync
    calls: list[Callable[[], Any]] = [
        sync.barrier,
        lambda: sync.signal(0),
        lambda: sync.wait_signal(0),
        sync.pull_start,
        sync.pull_end,
        sync.push_epoch,
        sync.push_exit,
        lambda: sync.all_reduce(torch.ones(3)),
        lambda: sync.all_reduce(torch.ones(0)),
        lambda: sync.buffer("new", (3,), torch.float32),
        sync.check,
    ]
    for call in calls:
        start = time.monotonic()
        expect(error, "broken", call)
        assert time.monotonic() - start < 0.3 * slack() * slack()
    expect(RuntimeError, "is broken", buffer.put, sync.token, sync.name, "b", torch.ones(2))
    expect(RuntimeError, "is broken", buffer.get, sync.token, sync.name, "b")
    assert sync.is_broken


def _without_rank_2(rank: int, what: str, way: str) -> str:
    """Ranks 0 and 1 wait for rank 2, which behaves in the given way. Returns the error's text."""
    sync = SyncGroup(timeout=TIMEOUT)
    sync.buffer("b", (2,), torch.float32)
    check_health(sync)
    tell(f"pid {rank}", str(os.getpid()))
    if rank == 2:
        return _misbehave(sync, what, way)
    learn("pid 2")
    if way in ("killed", "exited", "closed"):
        learn("gone")
        time.sleep(0.05)
    raised, seconds = timed(WAITS[what], sync)
    assert isinstance(raised, SyncTimeoutError), raised
    assert seconds < LIMIT * slack(), seconds
    if way in ("never", "late", "stopped"):
        assert seconds > 0.9 * TIMEOUT or "stopped because" in str(raised), seconds
        assert TIMEOUT <= raised.waited_s < LIMIT * slack()
    op = what.replace("unfenced ", "")
    assert (raised.group, raised.op, raised.channel) == ("world", op, CHANNELS[what])
    assert raised.missing_ranks == [2]
    assert_all_ops_fail_at_once(sync, SyncTimeoutError)
    again = expect(SyncTimeoutError, "is broken", sync.check)
    for field in ("group", "op", "channel", "missing_ranks", "waited_s"):
        assert getattr(again, field) == getattr(raised, field)
    tell(f"failed {rank}")
    if way == "stopped":
        learn(f"failed {1 - rank}")
        os.kill(int(learn("pid 2")), signal.SIGCONT)
        learn("seen")
    return str(raised)


def _misbehave(sync: SyncGroup, what: str, way: str) -> str:
    if way == "killed":
        tell("gone")
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "exited":
        tell("gone")
        os._exit(0)
    if way == "closed":
        sync.close()
        tell("gone")
        learn("failed 0"), learn("failed 1")
        return ""
    if way == "stopped":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    else:
        learn("failed 0"), learn("failed 1")
    if way == "never":
        return ""
    # It comes after all. It must not pass what the others have given up, and is told what it has missed.
    start = time.monotonic()
    call = WAITS[what] if what != "wait_signal" else lambda sync: sync.signal(0, 4)
    error = expect(SyncTimeoutError, "on rank 2 stopped because group 'world' is broken: ", call, sync)
    assert time.monotonic() - start < 0.3 * slack() * slack()
    assert error.missing_ranks == [2]
    assert_all_ops_fail_at_once(sync, SyncTimeoutError)
    tell("seen")
    return str(error)


@pytest.mark.parametrize("what", WAITS)
def test_case_28_a_rank_that_does_not_come_is_named_within_the_timeout(what: str) -> None:
    texts = run_ranks(_without_rank_2, 3, what, "late")
    host = re.escape(socket.gethostname())
    channel = f"channel={CHANNELS[what]}, " if CHANNELS[what] >= 0 else ""
    reporters = [text for text in texts[:2] if "stopped because" not in text]
    assert reporters
    for text in reporters:
        assert re.fullmatch(
            rf"gpusync: {what.split()[-1]}\(group='world', {channel}call \d+\) on rank (\d) "
            rf"\(global \1, host {host}, pid \d+\) waited \d\.\d s for rank 2 \(global 2, host {host}, "
            r"pid \d+, alive; last call 7 pull_end\(channel=0, fence=False\)\)\. The group stays broken "
            r"until all ranks call reset\(\), or close it and make it again",
            text,
        ), text


@pytest.mark.parametrize("way", ["killed", "exited", "closed", "stopped", "never"])
def test_a_rank_that_is_lost(way: str) -> None:
    lost = (2,) if way in ("killed", "exited") else ()
    texts = run_ranks(_without_rank_2, 3, "barrier", way, lost=lost)
    state = {
        "killed": r"pid \d+, dead; last call 7 ",
        "exited": r"pid \d+, dead; last call 7 ",
        "closed": "has closed the group; last call 7 ",
        "stopped": r"pid \d+, stopped; last call 7 ",
        "never": r"pid \d+, alive; last call 7 ",
    }
    for text in texts[:2]:
        assert re.search(rf"for rank 2 \(global 2, host [^,]+, {state[way]}", text), text
    if way == "killed":
        assert texts[2] == Lost(-signal.SIGKILL)


def _stopped_after_arriving(rank: int) -> float:
    """A rank that has arrived is not waited for, whatever becomes of it; it passes when it goes on."""
    sync = SyncGroup(timeout=5.0)
    tell(f"pid {rank}", str(os.getpid()))
    if rank == 2:
        sync.barrier()
        check_health(sync)
        return 0.0
    pid = int(learn("pid 2"))
    if rank == 0:
        while "last call 1 barrier" not in sync.dump().split("rank 2 ")[1]:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)
        tell("stopped")
    learn("stopped")
    start = time.monotonic()
    sync.barrier()
    seconds = time.monotonic() - start
    tell(f"passed {rank}")
    if rank == 0:
        learn("passed 1")
        os.kill(pid, signal.SIGCONT)
    check_health(sync)
    return seconds


def test_a_rank_that_stops_after_its_arrival_holds_up_nobody() -> None:
    assert max(run_ranks(_stopped_after_arriving, 3)) < 2.0 * slack()


def _dead_behind_a_late_one(rank: int) -> None:
    """Rank 3 is dead and rank 1 late. Who waits for rank 1 first hears of rank 3 all the same, and of it alone."""
    sync = SyncGroup(timeout=30.0)
    check_health(sync)
    if rank == 3:
        os._exit(0)
    if rank == 1:
        learn("failed 0"), learn("failed 2")
    error, seconds = timed(sync.barrier)
    assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [3], error
    assert seconds < 2.0 * slack() and "rank 1 (" not in str(error).split("waited")[1]
    tell(f"failed {rank}")


def test_a_dead_rank_is_noticed_behind_a_late_one() -> None:
    run_ranks(_dead_behind_a_late_one, 4, lost=(3,))


def _gone_after_its_arrival(rank: int) -> None:
    """Rank 2 arrives and goes at once. The others still wait for the late one, and pass."""
    sync = SyncGroup(timeout=30.0)
    check_health(sync)
    if rank == 2:
        threading.Timer(0.3, os._exit, (0,)).start()
        sync.barrier()
    if rank == 1:
        time.sleep(0.8)
    sync.barrier()
    assert not sync.is_broken
    error = expect(SyncTimeoutError, "for rank 2 ", sync.barrier)
    assert error.missing_ranks == [2]


def test_a_rank_that_is_gone_after_its_arrival_is_not_missing() -> None:
    run_ranks(_gone_after_its_arrival, 3, lost=(2,))


def _killed_at_any_time(rank: int, seed: int) -> int:
    """Rank 2 is killed in the middle of whatever it does; until then all results are right."""
    sync = SyncGroup(buffer_bytes=1 << 14, timeout=TIMEOUT)
    tell(f"pid {rank}", str(os.getpid()))
    pid = int(learn("pid 2"))
    sync.barrier()
    if rank == 0:
        timer = threading.Timer(0.02 + 0.013 * seed, os.kill, (pid, signal.SIGKILL))
        timer.start()
    k = 0
    ending = time.monotonic()
    try:
        while True:
            ending = time.monotonic()
            x = sync.all_reduce(torch.full((3000,), float(k + rank)))
            assert torch.equal(x, torch.full((3000,), 3.0 * k + 3))
            sync.barrier(k % 3)
            k += 1
    except SyncTimeoutError as error:
        assert time.monotonic() - ending < LIMIT * slack()
        assert error.missing_ranks == [2], error
    return k


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_rank_killed_at_any_time(seed: int) -> None:
    rounds = run_ranks(_killed_at_any_time, 3, seed, lost=(2,))
    assert rounds[0] > 0 and abs(rounds[0] - rounds[1]) <= 1, rounds


def _left_deciding(rank: int) -> str:
    """Rank 2 goes away between saying that it will decide whether the group is broken, and deciding."""
    from torch_gpusync import memory

    kept: list[torch.Tensor] = []
    share = memory.share

    def keep(*args: Any) -> torch.Tensor:
        kept.append(share(*args))
        return kept[-1]

    memory.share = keep
    sync = SyncGroup(timeout=10.0)
    sync.barrier()
    if rank == 2:
        # csrc/cpu/pages.h: the first word of the memory is the state: generation, rank, phase (1: deciding).
        state = kept[0][:4].view(torch.int32)
        assert state.item() == 0
        time.sleep(0.1)
        state.fill_(2 << 8 | 1)
        for peer in {*range(sync.world_size)} - {2}:
            learn(f"told {peer}")
        return str(expect(SyncTimeoutError, "is broken", sync.barrier))
    error, seconds = timed(sync.barrier)
    assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [2], error
    assert seconds < 2.5 * slack()
    tell(f"told {rank}")
    assert_fields = expect(SyncTimeoutError, "is broken", sync.check)
    assert assert_fields.op == "barrier" and assert_fields.channel == 0
    return str(error)


def test_a_decision_that_its_rank_leaves_halfway_is_taken_over() -> None:
    """By one of five who run out of patience at once, and that one has its own time to decide."""
    run_ranks(_left_deciding, 6)


def test_a_new_timeout_holds_for_a_wait_under_way() -> None:
    ranks = torch_gpusync.virtual_ranks(3, timeout=60.0)

    def body(index: int) -> float:
        if index == 2:
            time.sleep(0.3)
            for sync in ranks:
                sync.timeout = 0.5
            assert ranks[0].timeout == 0.5
            return 0.0
        start = time.monotonic()
        expect(SyncTimeoutError, "rank 2", ranks[index].barrier)
        return time.monotonic() - start

    assert all(0.4 < seconds < 1.5 * slack() for seconds in run_threads(body, 3, timeout=20)[:2])
    close_all(ranks)


def test_all_missing_ranks_are_named_in_order() -> None:
    ranks = torch_gpusync.virtual_ranks(16, timeout=TIMEOUT)
    missing = [3, 7, 11]

    def body(rank: int) -> None:
        if rank in missing:
            return
        error, seconds = timed(ranks[rank].barrier, 5)
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == missing, error
        assert seconds < LIMIT * slack() and error.channel == 5
        for other in missing:
            assert f"rank {other} (global {other}, " in str(error)

    run_threads(body, 16, timeout=20)
    close_all(ranks)

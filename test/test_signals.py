"""Ctrl-C during a wait, and processes that fork."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rank_tools import check_health, close_all, expect, learn, slack, tell, timed

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, SyncTimeoutError
from torch_gpusync.testing import Lost, run_ranks

# ---- Ctrl-C


def _wait_for_call(sync: SyncGroup, rank: int, op: str) -> None:
    """Until `rank` is in a call of `op`."""
    limit = time.monotonic() + 20
    while f"last call {1 + CALLS_BEFORE} {op}" not in sync.dump().split(f"rank {rank} ")[1].split("\n")[0]:
        assert time.monotonic() < limit, sync.dump()
        time.sleep(0.005)


CALLS_BEFORE = 7  # of check_health


def _interrupt(pid: int) -> float:
    os.kill(pid, signal.SIGINT)
    return time.monotonic()


WAITS: dict[str, Callable[[SyncGroup], Any]] = {
    "barrier": lambda sync: sync.barrier(3),
    "wait_signal": lambda sync: sync.wait_signal(2, 1),
    "all_reduce": lambda sync: sync.all_reduce(torch.ones(3)),
    "compiled barrier": lambda sync: torch.compile(_compiled_barrier, fullgraph=True, backend="eager")(
        torch.ones(2), sync
    ),
}


def _compiled_barrier(x: torch.Tensor, sync: SyncGroup) -> torch.Tensor:
    sync.barrier(3)
    return x + 1


def _interrupted(rank: int, what: str) -> None:
    sync = SyncGroup(timeout=60.0)
    check_health(sync)
    op = what.split()[-1]
    if rank == 1:
        tell("pid", str(os.getpid()))
        start = time.monotonic()
        expect(KeyboardInterrupt, "", WAITS[what], sync)
        assert time.monotonic() - float(learn("sent")) < 1.0 * slack() and time.monotonic() > start
    elif rank == 0:
        _wait_for_call(sync, 1, op)
        time.sleep(0.1)
        tell("sent", str(_interrupt(int(learn("pid")))))
        error, seconds = timed(sync.barrier, 3)
        assert type(error) is SyncError and seconds < 1.0 * slack(), error
    else:
        learn("sent")
        time.sleep(0.3)
        expect(SyncError, "is broken", sync.barrier, 3)
    error = expect(
        SyncError, rf"{op}\(.* on rank 1 \(.* was interrupted by SIGINT after \d\.\d s", sync.check
    )
    assert sync.is_broken
    expect(SyncError, "was interrupted by SIGINT", sync.barrier)


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_ends_a_wait_and_the_group(what: str) -> None:
    run_ranks(_interrupted, 3, what)


def _waits_in_a_thread(rank: int) -> None:
    """The wait is not in the main thread, which goes on in Python."""
    sync = SyncGroup(timeout=60.0)
    check_health(sync)
    if rank != 1:
        expect(SyncError, "on rank 1 .* was interrupted by SIGINT", sync.barrier, 3)
        return
    seen: list[BaseException | None] = []
    worker = threading.Thread(target=lambda: seen.append(timed(sync.barrier, 5)[0]))
    worker.start()
    _wait_for_call(sync, 1, "barrier")
    start = time.monotonic()
    threading.Timer(0.1, _interrupt, (os.getpid(),)).start()
    expect(KeyboardInterrupt, "", _main_loop)
    worker.join(5)
    assert time.monotonic() - start < 1.1 * slack()
    assert type(seen[0]) is SyncError and "was interrupted by SIGINT" in str(seen[0])


def _main_loop() -> None:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        sum(range(1000))


def test_ctrl_c_ends_a_wait_in_another_thread() -> None:
    run_ranks(_waits_in_a_thread, 3)


def _early(rank: int) -> None:
    """SIGINT while the wait still spins: nothing tells the sleep that comes after, unless it was counted."""
    assert rank == 0
    choice = random.Random(0)
    main = threading.get_ident()
    for _ in range(25):
        ranks = torch_gpusync.virtual_ranks(2, timeout=10.0)
        name, delay = ranks[0].name, choice.random() * 2e-4

        def send(name: str = name, delay: float = delay) -> None:
            while torch.ops.gpusync._calls(name) == 0:
                pass
            end = time.perf_counter() + delay
            while time.perf_counter() < end:
                pass
            signal.pthread_kill(main, signal.SIGINT)

        sender = threading.Thread(target=send)
        start = time.monotonic()
        try:
            sender.start()
            ranks[0].barrier()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("nothing was raised")
        assert time.monotonic() - start < 1.0 * slack()
        sender.join()
        close_all(ranks)


def test_ctrl_c_before_a_wait_sleeps() -> None:
    run_ranks(_early, 1, process_group=False)


def _own_handler(rank: int, when: str) -> None:
    """A process's own handler gets the signal, once, and stays; the wait ends with an error that says why."""
    caught: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    if when == "before":
        signal.signal(signal.SIGINT, handler)
    sync = SyncGroup(timeout=60.0)
    check_health(sync)
    if when == "after":
        signal.signal(signal.SIGINT, handler)
    if rank == 1:
        threading.Timer(0.3, _interrupt, (os.getpid(),)).start()
        error, seconds = timed(sync.barrier)
        assert type(error) is SyncError and "was interrupted by SIGINT" in str(error), error
        assert seconds < 1.3 * slack()
        assert caught == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
        sync.close()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert caught == [signal.SIGINT] * 2
    else:
        expect(SyncError, "on rank 1 .* was interrupted by SIGINT", sync.barrier, 5)
        assert caught == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_process_is_kept(when: str) -> None:
    run_ranks(_own_handler, 3, when)


def _ignored(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sync = SyncGroup(timeout=60.0)
    if rank == 0:
        time.sleep(0.4)
        check_health(sync)
    else:
        threading.Timer(0.2, _interrupt, (os.getpid(),)).start()
        check_health(sync)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_process_that_ignores_ctrl_c_goes_on_waiting() -> None:
    run_ranks(_ignored, 3)


def _default(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sync = SyncGroup(timeout=60.0)
    check_health(sync)
    if rank == 1:
        threading.Timer(0.2, _interrupt, (os.getpid(),)).start()
        sync.barrier()
    expect(SyncTimeoutError, r"for rank 1 \(.*, dead; ", sync.wait_signal, 1)


def test_a_process_that_leaves_ctrl_c_at_its_default_ends() -> None:
    assert run_ranks(_default, 3, lost=(1,))[1] == Lost(-signal.SIGINT)


_CHAINING = """
#include <signal.h>
static struct sigaction previous;
static int calls;
static void on_signal(int number, siginfo_t* info, void* context) {
  ++calls;
  if (previous.sa_flags & SA_SIGINFO) previous.sa_sigaction(number, info, context);
  else previous.sa_handler(number);
}
int install(void) {
  struct sigaction mine = {0};
  mine.sa_sigaction = on_signal;
  mine.sa_flags = SA_SIGINFO;
  return sigaction(SIGINT, &mine, &previous);
}
int count(void) { return calls; }
"""


def _chained(rank: int, library: str) -> None:
    """Another library puts its handler in front of ours and calls ours, which has to be in front of it to count."""
    other = ctypes.CDLL(library)
    main = threading.main_thread().ident
    assert main is not None
    ranks = torch_gpusync.virtual_ranks(2, timeout=20.0)
    assert other.install() == 0
    for k in range(3):
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        start = time.monotonic()
        expect(KeyboardInterrupt, "", ranks[0].barrier)
        assert time.monotonic() - start < 1.2 * slack() and other.count() == k + 1
        close_all(ranks)
        ranks = torch_gpusync.virtual_ranks(2, timeout=20.0)
    close_all(ranks)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    except KeyboardInterrupt:
        assert other.count() == 4
    else:
        raise AssertionError("Python's handler was not reached")


def test_a_library_that_chains_its_own_handler(tmp_path: Path) -> None:
    source, library = tmp_path / "chaining.c", tmp_path / "chaining.so"
    source.write_text(_CHAINING)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    run_ranks(_chained, 1, str(library), process_group=False)


def _interrupted_set_up(rank: int) -> None:
    """Ctrl-C while the group is made: the others hear of it at once, and all can try again."""
    first = SyncGroup(name="first", timeout=20.0)
    first.barrier()
    for call, what in [
        (lambda: SyncGroup(timeout=60.0), "SyncGroup"),
        (lambda: first.buffer("b", (2,), torch.int32), "buffer"),
    ]:
        first.timeout = 60.0
        if rank == 1:
            threading.Timer(0.4, _interrupt, (os.getpid(),)).start()
            start = time.monotonic()
            expect(KeyboardInterrupt, "", call)
            assert time.monotonic() - start < 1.4 * slack()
        elif rank == 0:
            error, seconds = timed(call)
            assert type(error) is SyncError and seconds < 1.5 * slack(), (error, seconds)
            assert f"{what}(" in str(error) and "rank 1 (global 1) has left it: it was interrupted" in str(
                error
            )
            tell(f"{what} failed")
        else:
            learn(f"{what} failed")
        assert call() is not None
        check_health(first)


def test_ctrl_c_during_set_up() -> None:
    run_ranks(_interrupted_set_up, 3)


# ---- fork

_FORKED = (
    "was made before this process was forked and belongs to the parent: make a group of its own in the child"
)


def _child(sync: SyncGroup, rank: int) -> None:
    """What a forked child may do: nothing with its parent's group, everything with one of its own."""
    buffer = torch_gpusync.SymmetricBuffer(sync, "b", torch.Size((2,)), torch.float32)
    calls: list[Callable[[], Any]] = [
        sync.barrier,
        lambda: sync.signal(0),
        lambda: sync.wait_signal(0),
        sync.pull_start,
        sync.pull_end,
        sync.push_epoch,
        sync.push_exit,
        lambda: buffer.put(torch.ones(2)),
        lambda: buffer.get(),
        lambda: sync.all_reduce(torch.ones(3)),
        lambda: sync.all_reduce(torch.ones(0)),
        lambda: setattr(sync, "timeout", 0.1),
    ]
    for call in calls:
        expect(SyncError, _FORKED, call)
    assert sync.timeout == 20.0
    sync.close()
    torch.set_num_threads(1)  # renews torch's own pool after a fork, which two threads must not do at once
    # The name is free in the child.
    own = torch_gpusync.virtual_ranks(2, name=f"of rank {rank}", timeout=20.0)
    threads = [threading.Thread(target=check_health, args=(each,)) for each in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads) and not own[0].is_broken
    close_all(own)


def _forks(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)
    buffer = sync.buffer("b", (2,), torch.float32)
    buffer.put(torch.tensor([7.0, rank]))
    of_parent = torch_gpusync.virtual_ranks(2, name=f"of rank {rank}")
    check_health(sync)
    # By os.fork, with all that the child's exit runs...
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _child(sync, rank)
            atexit._run_exitfuncs()
            del sync, buffer, of_parent
            gc.collect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    for salt in range(20):
        check_health(sync, salt)
    assert os.waitpid(pid, 0)[1] == 0
    # ... and by multiprocessing.
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    child = multiprocessing.get_context("fork").Process(target=_child, args=(sync, rank))
    child.start()
    for salt in range(20):
        check_health(sync, salt)
    child.join(30)
    assert child.exitcode == 0
    check_health(sync)
    assert buffer.get((rank + 1) % 3).tolist() == [7.0, (rank + 1) % 3]
    assert f"rank {rank} (global {rank}" in sync.dump() and "has closed" not in sync.dump()
    assert not of_parent[0].is_broken
    sync.barrier()  # nobody leaves, which closes, before all have looked


def test_a_group_made_before_a_fork_is_refused_in_the_child() -> None:
    run_ranks(_forks, 3, timeout=90)


def _forks_in_a_barrier(rank: int) -> None:
    """The fork happens while another thread of the parent waits: the wait is the parent's alone."""
    sync = SyncGroup(timeout=20.0)
    result: list[BaseException | None] = []
    waiter = threading.Thread(target=lambda: result.append(timed(sync.barrier)[0]))
    if rank == 0:
        waiter.start()
        time.sleep(0.2)
        pid = os.fork()
        if pid == 0:
            error, _ = timed(sync.barrier)
            os._exit(0 if _FORKED in str(error) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        tell("forked")
        waiter.join(20)
        assert result == [None]
    else:
        learn("forked")
        sync.barrier()
    check_health(sync)


def test_a_fork_during_a_wait() -> None:
    run_ranks(_forks_in_a_barrier, 3)

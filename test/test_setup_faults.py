"""Set-up ends whatever a rank does: the others are told who is missing or has failed, and can try again."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_tools import check_health, expect, learn, slack, tell, timed

from torch_gpusync import SyncError, SyncGroup, SyncTimeoutError, memory
from torch_gpusync.testing import run_ranks

TIMEOUT = 1.0
LIMIT = TIMEOUT + 1.0


def _never_makes_it(rank: int) -> None:
    SyncGroup(name="first", timeout=20.0).barrier()  # all are here
    if rank == 2:
        learn("failed 0"), learn("failed 1")
    else:
        start = time.monotonic()
        error = expect(
            SyncTimeoutError, r"^gpusync: SyncGroup\(group='world'\) on rank ", SyncGroup, timeout=TIMEOUT
        )
        assert TIMEOUT <= time.monotonic() - start < LIMIT * slack()
        assert (error.group, error.op, error.channel, error.missing_ranks) == ("world", "SyncGroup", -1, [2])
        assert re.search(
            r"waited \d\.\d s for rank 2 \(global 2\): every rank of the process group has to", str(error)
        )
        assert TIMEOUT <= error.waited_s < LIMIT * slack()
        tell(f"failed {rank}")
    # All try again. The one that was late takes part in this, and not in what the others have given up.
    sync = SyncGroup(timeout=20.0)
    assert sync.name == "world"
    check_health(sync)
    # The same with a buffer.
    if rank == 0:
        learn("no buffer 1"), learn("no buffer 2")
    else:
        sync.timeout = TIMEOUT
        error = expect(SyncTimeoutError, r"buffer\(group='world'\)", sync.buffer, "b", (2,), torch.float32)
        assert (error.op, error.missing_ranks) == ("buffer", [0])
        sync.timeout = 20.0
        tell(f"no buffer {rank}")
    assert sync.buffer("b", (2,), torch.float32).get().tolist() == [0.0, 0.0]
    assert not sync.is_broken
    check_health(sync)


def test_a_rank_that_does_not_make_the_group_in_time() -> None:
    run_ranks(_never_makes_it, 3)


def _comes_when_the_others_have_left(rank: int) -> None:
    SyncGroup(name="first", timeout=20.0).barrier()
    if rank != 2:
        expect(SyncTimeoutError, "rank 2", SyncGroup, timeout=0.3)
        tell(f"failed {rank}")
        learn("failed 2")
    else:
        learn("failed 0"), learn("failed 1")
        error, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [0, 1]
        assert TIMEOUT <= seconds < LIMIT * slack()
        assert re.search(r"\(rank [01] has given up an earlier one\)", str(error)), error
        tell("failed 2")
    check_health(SyncGroup(timeout=20.0))


def test_a_rank_that_comes_when_the_others_have_left() -> None:
    run_ranks(_comes_when_the_others_have_left, 3)


def _leaves_halfway(rank: int, how: str, step: int) -> None:
    """Rank 2 dies or stops between two rounds of the set-up."""
    from torch_gpusync.rendezvous import Rendezvous

    SyncGroup(name="first", timeout=20.0).barrier()  # all are here
    open_before = _open_things()
    if rank == 2:
        meet, rounds = Rendezvous._meet, iter(range(100))

        def stop_at_step(self: Rendezvous, *args: Any) -> Any:
            if next(rounds) == step:
                tell("pid", str(os.getpid()))
                # To this thread: another one may take a signal to the process, and this one run on meanwhile.
                signal.pthread_kill(
                    threading.get_ident(), signal.SIGKILL if how == "dies" else signal.SIGSTOP
                )
            return meet(self, *args)

        Rendezvous._meet = stop_at_step  # type: ignore[method-assign]
        error, seconds = timed(lambda: SyncGroup(timeout=60.0))
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [2], error
        assert "stopped because rank" in str(error)
    else:
        error, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [2], error
        assert seconds < LIMIT * slack()
        tell(f"failed {rank}")
        if rank == 0 and how == "stops":
            learn("failed 1")
            os.kill(int(learn("pid")), signal.SIGCONT)
    assert str(error) and _open_things() == open_before
    if how == "stops":
        check_health(SyncGroup(timeout=20.0))


def _open_things() -> list[str]:
    """What a set-up that failed could leave: mappings, files, open names."""
    gc.collect()
    maps = [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gpusync" in line
    ]
    files = [str(os.readlink(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    return [m for m in maps if "memfd" in m or "shm" in m] + [f for f in files if "gpusync" in f]


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize(
    ("how", "step"), [("dies", 0), ("dies", 2), ("dies", 4), ("stops", 1), ("stops", 3), ("stops", 4)]
)
def test_a_rank_that_leaves_halfway(how: str, step: int) -> None:
    run_ranks(_leaves_halfway, 3, how, step, lost=(2,) if how == "dies" else ())


def _hosts_the_store(rank: int, how: str, address: str) -> None:
    """Rank 0 hosts the process group's store, as it does without torchrun, and then does not answer."""
    port = Path(address)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (port.parent / "new").write_text(f"{store.port}")
        (port.parent / "new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    number = int(port.read_text())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", number, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    SyncGroup(timeout=20.0).barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return
    time.sleep(0.3)
    error, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
    assert type(error) is SyncError and seconds < LIMIT * slack(), (error, seconds)
    if how == "dies":
        assert "the process group's store does not answer: has the process that hosts it" in str(error)
    else:
        assert "store has not answered in 1.0 s: is the process that hosts it (global rank 0, or " in str(
            error
        )
        again, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
        assert type(again) is SyncError and seconds < LIMIT * slack(), (again, seconds)
    # The test process waits for these ranks before it ends rank 0.


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_store_that_does_not_answer(how: str, tmp_path: Path) -> None:
    run_ranks(_hosts_the_store, 3, how, str(tmp_path / "port"), process_group=False, lost=(0,))


def _broken_meanwhile(rank: int) -> None:
    """A rank that waits in buffer() hears that the group has broken."""
    sync = SyncGroup(timeout=30.0)
    if rank == 0:
        error, seconds = timed(lambda: sync.buffer("b", (2,), torch.float32))
        assert isinstance(error, SyncTimeoutError) and (error.op, error.missing_ranks) == ("barrier", [0])
        assert seconds < 5.0 * slack()
        tell("heard")
    else:
        time.sleep(0.2)
        sync.timeout = 0.3
        expect(SyncTimeoutError, "rank 0", sync.barrier)
        expect(SyncTimeoutError, "rank 0", sync.buffer, "b", (2,), torch.float32)
        learn("heard")  # else another set-up call may come between, which rank 0 would take its own for
    sync.close()
    check_health(SyncGroup(name="again", timeout=20.0))


def test_a_group_that_breaks_while_a_rank_sets_up_a_buffer() -> None:
    run_ranks(_broken_meanwhile, 3)


def _one_rank_fails_on_its_own(rank: int) -> None:
    """An error that only one rank meets, in the middle of the set-up, is told to all, who can try again."""
    real = memory._map
    if rank == 1:

        def refuse(*args: Any) -> Any:
            raise OSError("no more mappings")

        memory._map = refuse
    expect(SyncError, "cannot map one another's memory .*rank 1: no more mappings", SyncGroup, timeout=20.0)
    memory._map = real
    check_health(SyncGroup(timeout=20.0))


def test_an_error_of_one_rank_is_told_to_all() -> None:
    run_ranks(_one_rank_fails_on_its_own, 3)

"""Shared memory is there as long as a rank needs it, and nothing of it is left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_tools import check_health, close_all, expect, learn, tell

import torch_gpusync
from torch_gpusync import SyncGroup, SyncTimeoutError, memory
from torch_gpusync.testing import Lost, run_ranks

# ---- what is left behind


def _mapped() -> list[str]:
    """This process's mappings of shared memory that gpusync made."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "gpusync" in _last(line)]


def _last(line: str) -> str:
    fields = line.split(maxsplit=5)
    return fields[5] if len(fields) == 6 and ("memfd:" in fields[5] or "/dev/shm" in fields[5]) else ""


def _holders(inode: int) -> list[str]:
    """The processes that still map or hold the file with this number."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
            held = any(line.split()[4] == str(inode) for line in lines if "gpusync" in _last(line))
            held = held or any(
                os.stat(fd).st_ino == inode for fd in (process / "fd").iterdir() if _is_ours(fd)
            )
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if held:
            found.append(process.name)
    return found


def _is_ours(fd: Path) -> bool:
    return "gpusync" in os.readlink(fd)


def _named_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("gpusync-")}


def _killed_together(rank: int) -> None:
    """Ranks 0 to 2 have a group and a buffer; rank 3 kills them all at once and looks at what is left."""
    group = dist.new_group([0, 1, 2])
    if rank < 3:
        before = len(os.listdir("/proc/self/fd"))
        sync = SyncGroup(group, timeout=60.0)
        sync.buffer("b", (1000,), torch.float32).put(torch.ones(1000))
        check_health(sync)
        mapped = _mapped()
        assert len(mapped) == 2 and all("/memfd:gpusync (deleted)" in line for line in mapped), mapped
        assert len(os.listdir("/proc/self/fd")) <= before  # a mapping needs no descriptor
        inodes = sorted({int(line.split()[4]) for line in mapped})
        tell(f"pid {rank}", f"{os.getpid()} {inodes[0]} {inodes[1]}")
        sync.barrier()
        sync.wait_signal((rank + 1) % 3)
    facts = [learn(f"pid {r}").split() for r in range(3)]
    inodes = {int(inode) for _, *each in facts for inode in each}
    assert len(inodes) == 2  # the ranks map the same two files
    named = _named_files()
    assert all(len(_holders(inode)) == 3 for inode in inodes)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none lives to see another die
        for pid, *_ in facts:
            os.kill(int(pid), number)
    limit = time.monotonic() + 10
    while left := [holder for inode in inodes for holder in _holders(inode)]:
        assert time.monotonic() < limit, left
        time.sleep(0.02)
    assert _named_files() <= named


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    assert run_ranks(_killed_together, 4, lost=(0, 1, 2))[:3] == [Lost(-signal.SIGKILL)] * 3


def _resources() -> dict[str, int]:
    gc.collect()
    return {
        "mappings": len(_mapped()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(torch_gpusync.group._open_names) + len(torch_gpusync.ops.buffer_meta),
        "resident kB": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
        "lines of maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def assert_no_growth(before: dict[str, int], after: dict[str, int]) -> None:
    for key, allowed in {"resident kB": 8000, "lines of maps": 20}.items():
        assert after.pop(key) <= before.pop(key) + allowed, key
    assert after == before


def _cycles(rank: int, cycles: int) -> None:
    keys = dist.distributed_c10d._get_default_store().num_keys
    before: dict[str, int] = {}
    keys_before = 0
    for k in range(cycles):
        if k == 10:
            before = _resources()
            dist.barrier()
            keys_before = keys()
            dist.barrier()
        sync = SyncGroup(name="again", buffer_bytes=4096, channels=2, timeout=20.0)
        buffer = sync.buffer("b", (10, k % 7), torch.float32)
        buffer.put(torch.full((10, k % 7), float(k)))
        sync.barrier()
        if k % 10 == 0:
            sync.reset()
            sync.barrier()
        sync.close()
    assert_no_growth(before, _resources())
    dist.barrier()
    assert keys() <= keys_before + 3  # the process group's own


def test_500_cycles_leave_nothing() -> None:
    run_ranks(_cycles, 3, 500, timeout=300)


def _virtual_cycles(rank: int) -> None:
    before: dict[str, int] = {}
    for k in range(500):
        if k == 10:
            before = _resources()
        ranks = torch_gpusync.virtual_ranks(2, name="again", buffer_bytes=4096, channels=1)
        if k % 2:
            close_all(ranks)
        del ranks
    assert_no_growth(before, _resources())


def test_500_cycles_of_virtual_ranks_leave_nothing() -> None:
    run_ranks(_virtual_cycles, 1, process_group=False, timeout=120)


def _outlives_its_owner(rank: int) -> None:
    """Rank 0 made the memory. It closes and ends; the part of rank 0 is still there for the others to read."""
    sync = SyncGroup(timeout=20.0)
    buffer = sync.buffer("b", (3,), torch.int64)
    buffer.put(torch.arange(3) + 10 * rank)
    sync.barrier()
    if rank == 0:
        os._exit(0)
    time.sleep(0.1)
    for other in range(3):
        assert buffer.get(other).tolist() == [10 * other, 10 * other + 1, 10 * other + 2]
    tell(f"read by {rank}")
    learn(f"read by {3 - rank}")  # before the next barrier breaks the group
    error = expect(SyncTimeoutError, r"for rank 0 \(.*, dead; ", sync.barrier)
    assert error.missing_ranks == [0]  # and not the other one, which may be on its way
    sync.close()


def test_memory_outlives_the_rank_that_made_it() -> None:
    run_ranks(_outlives_its_owner, 3, lost=(0,))


# ---- where the ranks cannot open one another's descriptors


def _by_a_named_file(rank: int, why: str) -> None:
    import torch_gpusync.group as group

    files: list[list[str]] = []
    real = {"open": os.open, "map": memory._map, "identity": memory._identity}
    if why == "no memfd" and rank == 0:

        def refuse(*args: Any) -> int:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        os.memfd_create = refuse
    if why == "no access" and rank == 2:

        def deny(path: Any, *args: Any, **kwargs: Any) -> int:
            if str(path).startswith("/proc/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real["open"](path, *args, **kwargs)

        os.open = deny
    if why == "other namespace":
        # The path leads to a file of another process there, and process ids say nothing.
        group._pid_namespace = lambda: 4026531836 + rank

        def elsewhere(file: int | str) -> list[int]:
            other = rank == 1 and str(file).startswith("/proc/")
            return real["identity"]("/proc/self/exe" if other else file)

        memory._identity = elsewhere

    def keep_names(*args: Any) -> torch.Tensor:
        files.append(
            sorted(name for name in _named_files() if (os.stat(f"/dev/shm/{name}").st_mode & 0o777) == 0o600)
        )
        return real["map"](*args)

    memory._map = keep_names
    sync = SyncGroup(timeout=1.0)
    buffer = sync.buffer("b", (5,), torch.int32)
    assert any(names for names in files), "no named file was used"
    check_health(sync)
    buffer.put(torch.arange(5, dtype=torch.int32) + rank, rank=(rank + 1) % 3)
    sync.barrier()
    assert buffer.get().tolist() == [i + (rank - 1) % 3 for i in range(5)]
    mapped = [line for line in _mapped() if "/dev/shm/gpusync-" in line]
    assert len(mapped) == 2 and all(line.endswith(" (deleted)") for line in mapped)
    if why == "other namespace":
        # Nobody can see whether a peer lives, so nobody says so; and who has closed is known all the same.
        if rank == 0:
            learn("failed 1"), learn("failed 2")
        else:
            text = str(expect(SyncTimeoutError, "waited", sync.barrier))
            assert f"rank 0 (global 0, host {os.uname().nodename}, pid {learn('pid')}; last call" in text
            tell(f"failed {rank}")
    dist.barrier()
    sync.close()
    assert not _mapped()


def _tells_its_pid(rank: int, why: str) -> None:
    if rank == 0:
        tell("pid", str(os.getpid()))
    named = _named_files()
    dist.barrier()
    _by_a_named_file(rank, why)
    dist.barrier()
    assert _named_files() <= named


@pytest.mark.parametrize("why", ["no memfd", "no access", "other namespace"])
def test_a_named_file_where_descriptors_cannot_be_opened(why: str) -> None:
    run_ranks(_tells_its_pid, 3, why)

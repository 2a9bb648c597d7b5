"""Shared memory: nothing of it is left behind, nothing is written beside it, and too little of it is an error."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_tools import check_health, close_all, expect, learn, slack, tell

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, SyncTimeoutError, memory
from torch_gpusync.testing import Lost, run_ranks, run_threads

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


# ---- nothing beside it

_CANARY = 0xA5
_MARGIN = 8192


@pytest.fixture
def with_canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Every piece of shared memory lies between two margins, filled with a pattern."""
    whole: list[torch.Tensor] = []
    share = memory.share

    def with_margins(rendezvous: Any, nbytes: int, *args: Any) -> torch.Tensor:
        outer = share(rendezvous, nbytes + 2 * _MARGIN, *args)
        outer[:_MARGIN] = _CANARY
        outer[-_MARGIN:] = _CANARY
        whole.append(outer)
        return outer[_MARGIN:-_MARGIN]

    monkeypatch.setattr(memory, "share", with_margins)
    yield whole
    assert whole
    for outer in whole:
        margins = torch.cat([outer[:_MARGIN], outer[-_MARGIN:]])
        assert (margins == _CANARY).all(), (margins != _CANARY).nonzero().tolist()[:10]


@pytest.mark.parametrize(
    ("world_size", "channels", "buffer_bytes"), [(1, 1, 1), (3, 2, 8192), (5, 8, 4096 * 5)]
)
def test_case_27_nothing_is_written_beside_the_pads(
    with_canaries: list[torch.Tensor], world_size: int, channels: int, buffer_bytes: int
) -> None:
    ranks = torch_gpusync.virtual_ranks(
        world_size, channels=channels, buffer_bytes=buffer_bytes, timeout=20.0
    )

    def body(rank: int) -> None:
        sync = ranks[rank]
        last = channels - 1
        for salt in range(4):  # both halves of everything
            for peer in range(world_size):
                sync.signal(peer, last)
            for peer in range(world_size):
                sync.wait_signal(peer, last)
            sync.barrier(last)
            sync.pull_start(last), sync.pull_end(last)
            sync.push_epoch(last), sync.push_exit(last)
            for numel in (1, 511, 512, 513, 1024, 5000):
                x = torch.full((numel,), float(rank + salt), dtype=torch.float64)
                total = float(sum(r + salt for r in range(world_size)))
                assert torch.equal(sync.all_reduce(x), torch.full((numel,), total, dtype=torch.float64))

    run_threads(body, world_size)
    close_all(ranks)


def test_case_23_buffers_of_every_size_and_offset(with_canaries: list[torch.Tensor]) -> None:
    """Parts of odd sizes: what one rank puts does not reach the next one's part, nor what lies between them."""
    ranks = torch_gpusync.virtual_ranks(3, timeout=20.0)

    def body(rank: int) -> None:
        sync = ranks[rank]
        for size in (*range(1, 20), 127, 128, 129, 255, 1000):
            buffer = sync.buffer(f"b{size}", (size,), torch.uint8)
            shared = with_canaries[-1]
            sync.barrier()
            if rank == 0:
                stride = -(-size // 128) * 128
                shared[_MARGIN:-_MARGIN].view(3, stride)[:, size:] = _CANARY
            sync.barrier()
            model = torch.zeros(size, dtype=torch.uint8)
            for offset in range(0, size, max(1, size // 20)):
                data = torch.full((size - offset,), (offset + rank) % 250, dtype=torch.uint8)
                buffer.put(data, offset=offset)
                model[offset:] = data
                assert torch.equal(buffer.get(), model)
            sync.barrier()
            if rank == 0:
                stride = -(-size // 128) * 128
                assert (shared[_MARGIN:-_MARGIN].view(3, stride)[:, size:] == _CANARY).all()
            sync.barrier()

    run_threads(body, 3)
    close_all(ranks)


def _signals_at_once(rank: int) -> None:
    """Rank 2 opens its part of the memory late; what its peers have sent there by then is not lost."""
    from torch_gpusync.rendezvous import Rendezvous

    exchange = Rendezvous.exchange

    def without_last(self: Rendezvous, value: Any, *args: Any) -> list[Any]:
        return (
            [] if value is None else exchange(self, value, *args)
        )  # so nobody waits for rank 2 to have opened

    Rendezvous.exchange = without_last  # type: ignore[method-assign]
    share = memory.share

    def late(*args: Any) -> torch.Tensor:
        shared = share(*args)
        time.sleep(0.5 if rank == 2 else 0.0)
        return shared

    memory.share = late
    start = time.monotonic()
    sync = SyncGroup(timeout=20.0)
    assert rank == 2 or time.monotonic() - start < 0.4 * slack()
    for peer in range(3):
        for _ in range(5 + rank):
            sync.signal(peer)
    if rank != 2:
        assert "rank 2 (has not opened the group)" in sync.dump() or slack() > 1
    sync.barrier()
    for peer in range(3):
        for _ in range(5 + peer):
            sync.wait_signal(peer)
    check_health(sync)


def test_case_05_signals_before_a_rank_has_opened_its_part() -> None:
    run_ranks(_signals_at_once, 3)


# ---- too little of it


def _too_little_memory(rank: int, how: str) -> None:
    sync = SyncGroup(buffer_bytes=4096, timeout=20.0)
    if how == "MemAvailable":
        memory._memory_available = lambda: 10_000_000
        pattern = "8[0-9]{7} bytes of shared memory are needed and 10000000 bytes are free"
    elif how == "control group":
        memory._cgroup_free = lambda: 11_000_000
        pattern = "and 11000000 bytes are free .*the control group's limit.*: use a smaller buffer"
    else:
        # A real limit of the kernel: no file of this process may grow beyond it. Only rank 0 makes files.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        pattern = r"cannot make a file of 8[0-9]{7} bytes .*File too large"
    for _ in range(2):
        expect(SyncError, pattern, SyncGroup, buffer_bytes=27 << 20, timeout=20.0)
        expect(SyncError, pattern, sync.buffer, "big", (27 << 20,), torch.uint8)
    small = sync.buffer("big", (5,), torch.uint8)  # the name is still free
    small.put(torch.full((5,), rank, dtype=torch.uint8))
    check_health(sync)


@pytest.mark.parametrize("how", ["MemAvailable", "control group", "file size limit"])
def test_too_little_memory(how: str) -> None:
    run_ranks(_too_little_memory, 3, how)


def _no_space(rank: int) -> None:
    sync = SyncGroup(buffer_bytes=4096, timeout=20.0)
    real_fallocate = os.posix_fallocate

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    descriptors = len(os.listdir("/proc/self/fd"))
    os.posix_fallocate = refuse
    pattern = r"cannot make a file of \d+ bytes of shared memory \(No space left on device\): use a smaller"
    expect(SyncError, pattern, SyncGroup, timeout=20.0)
    expect(SyncError, pattern, sync.buffer, "b", (9,), torch.float32)
    # The fallback has a folder of a size of its own, and says so.
    memfd_create = os.memfd_create
    os.memfd_create = lambda *args: (_ for _ in ()).throw(OSError(errno.EPERM, os.strerror(errno.EPERM)))
    expect(SyncError, f"in /dev/shm: {pattern}", sync.buffer, "b", (9,), torch.float32)
    os.posix_fallocate, os.memfd_create = real_fallocate, memfd_create
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [f for f in os.listdir("/dev/shm") if f.startswith("gpusync-")]
    assert sync.buffer("b", (9,), torch.float32).get().tolist() == [0.0] * 9
    check_health(sync)


def test_no_space_for_shared_memory() -> None:
    run_ranks(_no_space, 3)


def _no_address_space(rank: int) -> None:
    """A peer that cannot map what rank 0 offers: all ranks are told, and by whom."""
    sync = SyncGroup(buffer_bytes=4096, timeout=20.0)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), limits[1]))
    short = "rank 1: .*annot allocate memory.*"  # twice: the fallback fails as well
    pattern = rf"cannot map one another's memory \({short}{short}\): they have to run on one host"
    expect(SyncError, pattern, sync.buffer, "b", (50 << 20,), torch.uint8)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert sync.buffer("b", (3,), torch.uint8).get().tolist() == [0] * 3
    check_health(sync)


def test_no_address_space_on_one_rank() -> None:
    run_ranks(_no_address_space, 3)


def _system(root: Path, cgroup: str, files: dict[str, str], available_kb: int = 64 << 20) -> Path:
    for name, text in {
        "proc/self/cgroup": cgroup,
        "proc/meminfo": f"MemTotal:  99999999999 kB\nMemAvailable: {available_kb} kB\n",
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


CGROUPS: dict[str, tuple[str, dict[str, str], int | None]] = {
    "no limit": (
        "0::/\n",
        {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"},
        None,
    ),
    "version 2": (
        "0::/job/step\n",
        {
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "300\n",
            "sys/fs/cgroup/job/memory.max": "1000\n",
            "sys/fs/cgroup/job/memory.current": "400\n",
            "sys/fs/cgroup/job/memory.stat": "anon 300\ninactive_file 50\nactive_file 50\n",
        },
        650,
    ),
    "over its limit": (
        "0::/job\n",
        {"sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "1200\n"},
        0,
    ),
    # In a container the path is the host's, and the container's own group is mounted at the root.
    "container": (
        "0::/docker/0123\n",
        {"sys/fs/cgroup/memory.max": "700\n", "sys/fs/cgroup/memory.current": "100\n"},
        600,
    ),
    "version 1": (
        "5:devices:/\n4:cpu,memory:/job\n0::/\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "800\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "500\n",
            "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 10\ntotal_inactive_file 30\n",
        },
        330,
    ),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_limits_of_control_groups(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup, files, expected = CGROUPS[kind]
    monkeypatch.setattr(memory, "_SYSTEM", _system(tmp_path, cgroup, files))
    assert memory._cgroup_free() == expected
    available = 1024 * (64 << 20)
    assert memory.free_bytes() == (available if expected is None else min(expected, available))
    monkeypatch.setattr(memory, "_SYSTEM", _system(tmp_path, cgroup, files, available_kb=0))
    assert memory.free_bytes() == 0


def test_free_bytes_of_this_machine() -> None:
    free = memory.free_bytes()
    assert free is not None and 1 << 20 < free < 1 << 50


def test_where_the_system_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    assert memory.free_bytes() is None
    ranks = torch_gpusync.virtual_ranks(2, timeout=5.0)
    assert [sync.rank for sync in ranks] == [0, 1]

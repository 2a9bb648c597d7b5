"""Too little shared memory is an error on all ranks, after which their group still works; and what counts as free."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_tools import check_health, expect

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, memory
from torch_gpusync.testing import run_ranks


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

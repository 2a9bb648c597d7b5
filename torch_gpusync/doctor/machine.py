"""Probes of the machine: cores, GPUs, memory, and what processes may see of one another."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, human, one_line

_MODEST_BYTES = 64 << 20  # with less free memory, a group with its default buffer is at risk


def devices() -> Iterator[Finding]:
    """What ranks can run on."""
    section = "devices"
    cores = len(os.sched_getaffinity(0))
    advice = (
        ""
        if cores > 1
        else "ranks take turns on one core: expect milliseconds where cores would give microseconds"
    )
    yield Finding(section, "cpu cores", "ok" if cores > 1 else "note", f"{cores} of {os.cpu_count()}", advice)
    quota = _cpu_quota()
    if quota is not None:
        short = quota < cores
        advice = "more busy ranks than that are stopped for tens of milliseconds at a time" if short else ""
        yield Finding(section, "cpu quota", "note" if short else "ok", f"{quota:g} cores", advice)
    load = os.getloadavg()[0]
    busy = load > cores
    advice = "other work competes for the cores: latencies will be those of the scheduler" if busy else ""
    yield Finding(section, "load average", "note" if busy else "ok", f"{load:.2f}", advice)
    import torch

    if not torch.cuda.is_available():
        yield Finding(section, "gpus", "ok", "none that torch can use")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        value = f"{facts.name}, sm_{facts.major}{facts.minor}, {human(facts.total_memory)}"
        yield Finding(section, f"gpu {index}", "ok", value)


def _cpu_quota() -> float | None:
    """Cores' worth of time that the control group may use, or None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def memory() -> Iterator[Finding]:
    """Shared memory of either kind, and the limits on it."""
    section = "memory"
    from torch_gpusync.memory import free_bytes

    free = free_bytes()
    if free is None:
        yield Finding(section, "free", "unknown", "the system does not say")
    else:
        short = free < _MODEST_BYTES
        advice = (
            "make groups with a small buffer_bytes, or raise the container's memory limit" if short else ""
        )
        value = f"{human(free)} (the least of MemAvailable and the control groups' limits)"
        yield Finding(section, "free", "note" if short else "ok", value, advice)
    try:
        fd = os.memfd_create("gpusync-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            mmap.mmap(fd, mmap.PAGESIZE).close()
        finally:
            os.close(fd)
        yield Finding(section, "anonymous shared memory", "ok", "memfd_create works")
        has_memfd = True
    except OSError as error:
        advice = "a seccomp profile forbids it: named files in /dev/shm take its place"
        yield Finding(section, "anonymous shared memory", "note", one_line(error), advice)
        has_memfd = False
    try:
        facts = os.statvfs("/dev/shm")
        free = facts.f_bavail * facts.f_frsize
        value = f"{human(free)} free of {human(facts.f_blocks * facts.f_frsize)}"
        short = free < _MODEST_BYTES
        status = ("note" if has_memfd else "bad") if short else "ok"
        advice = "give the container more (docker run --shm-size=1g)" if short else ""
        yield Finding(section, "/dev/shm", status, value, advice)
    except OSError as error:
        status, advice = ("note", "") if has_memfd else ("bad", "mount a tmpfs at /dev/shm")
        yield Finding(section, "/dev/shm", status, one_line(error), advice)


_OPEN_PEERS_FILE = """
import os, sys
try:
    fd = os.open(sys.argv[1], os.O_RDWR)
    print("opened" if os.pread(fd, 7, 0) == b"gpusync" else "another file")
except OSError as error:
    print(error.strerror)
"""


def processes() -> Iterator[Finding]:
    """Can a peer open this process's anonymous memory? It does so through /proc, under the ptrace rules."""
    section = "processes"
    yield Finding(section, "pid namespace", "ok", os.readlink("/proc/self/ns/pid"))
    fd = os.memfd_create("gpusync-doctor", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, b"gpusync", 0)
        peer = subprocess.run(
            [sys.executable, "-S", "-c", _OPEN_PEERS_FILE, f"/proc/{os.getpid()}/fd/{fd}"],
            *(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        os.close(fd)
    said = peer.stdout.strip() or _last_line(peer.stderr)
    if said == "opened":
        yield Finding(section, "a peer's memory", "ok", "can be opened through /proc")
    else:
        advice = "ranks fall back to named files in /dev/shm, which has to be large enough"
        yield Finding(section, "a peer's memory", "note", f"cannot be opened through /proc: {said}", advice)


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1]

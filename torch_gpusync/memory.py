"""Shared memory of the ranks of one host."""

import contextlib
import errno
import os
import secrets
from pathlib import Path

import torch

from torch_gpusync.errors import SyncError
from torch_gpusync.rendezvous import Deadline, Rendezvous

# How much of what is free a mapping may take: past the limit the kernel kills processes instead of refusing
# memory.
_HEADROOM = 0.9

_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
_NAMED_FOLDER = "/dev/shm"
_SYSTEM = Path("/")  # where proc/ and sys/ are


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_free() -> int | None:
    """Bytes left under the tightest memory limit of this process's control groups; None without a limit."""
    try:
        lines = (_SYSTEM / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    free: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name = _SYSTEM / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = (
                _SYSTEM / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        # In a container the path may be the host's; then the limits that apply are at the mount's root.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            limit, usage = _read_int(place / limit_name), _read_int(place / usage_name)
            if limit is not None and usage is not None:
                free.append(max(limit - usage, 0) + _reclaimable(place))
            if place == root:
                break
    return min(free, default=None)


def _reclaimable(cgroup: Path) -> int:
    """Bytes of file cache in the usage of ``cgroup`` that the kernel gives up under pressure."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {name: int(count) for name, count in (line.split() for line in lines)}
    # Version 1 counts its own pages under the plain name, and under the other those of the groups below too.
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))


def _memory_available() -> int | None:
    try:
        lines = (_SYSTEM / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def free_bytes() -> int | None:
    """Bytes of memory that this process may still take, as far as the system tells."""
    return min((free for free in (_cgroup_free(), _memory_available()) if free is not None), default=None)


def _require_free(nbytes: int) -> None:
    free = free_bytes()
    if free is not None and nbytes > _HEADROOM * free:
        raise SyncError(
            f"not enough memory: {nbytes} bytes of shared memory are needed and {free} bytes are free "
            "(MemAvailable and the control group's limit): use a smaller buffer, a smaller buffer_bytes or "
            "fewer channels"
        )


def _identity(file: int | str) -> list[int]:
    status = os.stat(file)
    return [status.st_dev, status.st_ino]


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # The descriptor's own path: torch.from_file would create a path that does not exist.
    with torch.inference_mode(False):
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)


def _create_anonymous(nbytes: int) -> int:
    """A file without a name: gone with its last mapping, whatever happens to the processes."""
    fd = os.memfd_create("gpusync", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # unlike ftruncate it says at once that there is no space
    except OSError:
        os.close(fd)
        raise
    return fd


def _create_named(nbytes: int) -> tuple[int, str]:
    path = f"{_NAMED_FOLDER}/gpusync-{secrets.token_hex(16)}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd, path


def share(rendezvous: Rendezvous, nbytes: int, what: str, group: str, deadline: Deadline) -> torch.Tensor:
    """Zeroed memory of ``nbytes`` that all ranks map: a 1-D uint8 tensor, page-aligned. Collective.

    Rank 0 owns a file without a name and its peers open it through ``/proc``; where they cannot (other PID
    namespaces) a named file takes its place, unlinked as soon as all have mapped it. Nothing is left behind
    by a killed process but, for that moment, the named file.

    Raises:
        SyncError: too little memory, or the ranks cannot reach one another's memory; on all ranks.
        SyncTimeoutError: some ranks did not come.
    """
    reasons: list[str] = []
    for attempt in (_share_anonymous, _share_named):
        memory, problems = attempt(rendezvous, nbytes, what, group, deadline)
        if memory is not None:
            return memory
        reasons += problems
    raise SyncError(
        f"gpusync: {what} of group '{group}': the ranks cannot map one another's memory "
        f"({'; '.join(reasons)}): they have to run on one host as one user, and share the PID namespace or "
        "/dev/shm"
    )


def _share_anonymous(
    rendezvous: Rendezvous, nbytes: int, what: str, group: str, deadline: Deadline
) -> tuple[torch.Tensor | None, list[str]]:
    offer: dict[str, object] = {}
    fd = -1
    if rendezvous.rank == 0:
        try:
            _require_free(nbytes)
            fd = _create_anonymous(nbytes)
            offer = {"path": f"/proc/{os.getpid()}/fd/{fd}", "identity": _identity(fd)}
        except SyncError as error:
            offer = {"error": str(error)}
        except OSError as error:
            # Where a sandbox forbids files without a name, another kind of file may do.
            short = error.errno in _NO_SPACE
            offer = (
                {"error": _explain(error, nbytes)}
                if short
                else {"problem": f"memfd_create: {error.strerror}"}
            )
    return _adopt(rendezvous, nbytes, what, group, deadline, offer, fd)


def _share_named(
    rendezvous: Rendezvous, nbytes: int, what: str, group: str, deadline: Deadline
) -> tuple[torch.Tensor | None, list[str]]:
    offer: dict[str, object] = {}
    fd, path = -1, ""
    if rendezvous.rank == 0:
        try:
            fd, path = _create_named(nbytes)
            offer = {"path": path, "identity": _identity(fd)}
        except OSError as error:
            offer = {"error": f"in {_NAMED_FOLDER}: {_explain(error, nbytes)}"}
    try:
        return _adopt(rendezvous, nbytes, what, group, deadline, offer, fd)
    finally:
        if path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _explain(error: OSError, nbytes: int) -> str:
    text = f"cannot make a file of {nbytes} bytes of shared memory ({error.strerror})"
    if error.errno in _NO_SPACE:
        return f"{text}: use a smaller buffer, a smaller buffer_bytes or fewer channels, or make room for it"
    return text


def _adopt(
    rendezvous: Rendezvous,
    nbytes: int,
    what: str,
    group: str,
    deadline: Deadline,
    offer: dict[str, object],
    fd: int,
) -> tuple[torch.Tensor | None, list[str]]:
    """Maps what rank 0 offers. All ranks return the same verdict: the memory, or nothing and the reasons."""
    try:
        offered = rendezvous.exchange(offer, what, group, deadline)[0]
        if "error" in offered:
            raise SyncError(f"gpusync: {what} of group '{group}': {offered['error']}")
        if "problem" in offered:
            return None, [offered["problem"]]
        memory, problem = None, ""
        try:
            # Looked at before it is opened: in another PID namespace the path may lead to anything.
            if _identity(offered["path"]) != offered["identity"]:
                problem = f"rank {rendezvous.rank}: {offered['path']} is another file there"
            else:
                if rendezvous.rank != 0:
                    fd = os.open(offered["path"], os.O_RDWR | os.O_CLOEXEC)
                memory = _map(fd, nbytes)
        except (OSError, RuntimeError) as error:
            problem = f"rank {rendezvous.rank}: {error}"
        problems = [text for text in rendezvous.exchange(problem, what, group, deadline) if text]
        return (None, problems) if problems else (memory, [])
    finally:
        if fd >= 0:
            os.close(fd)

"""What SyncGroup is given, checked: sizes, times, devices."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_gpusync.errors import SyncError


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def checked_shape(shape: Sequence[int]) -> torch.Size:
    try:
        size = torch.Size(shape)
    except TypeError:
        raise SyncError(f"shape must be a sequence of whole numbers, not {shape!r}") from None
    if any(extent < 0 for extent in size):
        raise SyncError(f"shape must not have negative sizes, got {list(size)}")
    return size


def as_seconds(timeout: float | timedelta) -> float:
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        raise SyncError(f"gpusync: timeout must be seconds or a timedelta, got {timeout!r}") from None
    if not seconds > 0:
        raise SyncError(f"gpusync: timeout must be positive, got {seconds} s")
    return seconds


def as_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise SyncError(f"gpusync: device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}") from None


def default_device(group: dist.ProcessGroup) -> torch.device:
    """The device that the process group itself works on."""
    bound = group.bound_device_id
    if bound is not None:
        return bound
    backends = str(dist.get_backend_config(group))
    if "nccl" in backends:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        if "gloo" not in backends:
            raise SyncError("gpusync: the process group uses NCCL but this process sees no GPU: pass device=")
    if "gloo" in backends or "mpi" in backends:
        return torch.device("cpu")
    raise SyncError(
        f"gpusync: cannot tell the device from the process group's back ends ({backends}): pass device="
    )

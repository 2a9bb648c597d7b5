"""A group made usable again, in place: what :meth:`SyncGroup.reset` does on one rank (csrc/cpu/reset.cpp says why so)."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_compiling

from torch_gpusync.errors import SyncError
from torch_gpusync.ops import ops
from torch_gpusync.rendezvous import Deadline, Rendezvous

if TYPE_CHECKING:
    from torch_gpusync.group import SyncGroup

# How long it waits at least: ranks find out about a failure, and recover from it, at different times.
MIN_SECONDS = 60.0


def reset(sync: SyncGroup) -> None:
    """See :meth:`SyncGroup.reset`."""
    if is_compiling():
        raise SyncError("gpusync: reset() cannot be compiled: call it outside the compiled function")
    meeting = sync._meeting("reset")
    sync._ask(ops._is_idle)  # raises if the group is closed, before any peer is kept waiting
    deadline = Deadline(max(sync.timeout, MIN_SECONDS), gone=partial(ops._gone, sync.name))
    with meeting.turn("reset", sync.name, deadline):
        _reset(sync, meeting, deadline)


def _reset(sync: SyncGroup, meeting: Rendezvous, deadline: Deadline) -> None:
    try:
        _drain(sync, deadline)
    except SyncError as error:
        meeting.refuse(str(error), "reset", sync.name, deadline)
        raise
    meeting.agree({"call": "reset", "group": sync._shared_name}, "reset", sync.name, deadline)
    problem = _rebase(sync)
    try:
        meeting.confirm(problem, "reset", sync.name, deadline)
    except BaseException:
        if sync.device.type == "cuda":
            ops._cuda_break(sync.name)
        raise
    sync._ask(ops._revive)


def _drain(sync: SyncGroup, deadline: Deadline) -> None:
    """Wait until nothing that this rank has called or launched is under way."""
    while not sync._ask(ops._is_idle):
        if deadline.expired:
            raise SyncError(
                f"gpusync: reset of group '{sync.name}' has waited {deadline.waited:.1f} s for another thread of rank "
                f"{sync.rank}, which is still in a call of the group: let it end first"
            )
        time.sleep(0.001)
    if sync.device.type != "cuda":
        return
    complain_of_capture(sync)
    try:
        torch.cuda.synchronize(sync.device)
    except RuntimeError as error:
        raise SyncError(f"gpusync: reset of group '{sync.name}': {error}") from None


def complain_of_capture(sync: SyncGroup) -> None:
    """Raise SyncError while the current stream is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise SyncError(
            f"gpusync: reset of group '{sync.name}' waits for the GPU, which cannot be done while a CUDA graph is "
            "captured: call it outside the capture"
        )


def _rebase(sync: SyncGroup) -> str:
    """This rank's own part. Returns what went wrong: not raised, for the peers are to be told."""
    try:
        sync._ask(ops._rebase)
        if sync.device.type == "cuda":
            ops._cuda_rebase(sync.name)
    except RuntimeError as error:
        return str(error)
    return ""

"""What goes wrong between ranks, as exceptions."""

import re
from enum import IntEnum

import torch


class SyncError(RuntimeError):
    """An op or a set-up call of gpusync could not be carried out. Base of the other errors here."""


class SyncTimeoutError(SyncError):
    """A wait expired: some ranks did not come. The group is then broken for all of its ranks.

    Attributes:
        group: name of the group.
        op: the op that waited, for example ``"barrier"``; ``"SyncGroup"`` or ``"buffer"`` for set-up.
        channel: its channel, -1 for collectives and set-up.
        missing_ranks: sorted ranks, in the group, that had not come.
        waited_s: seconds waited.
    """

    def __init__(
        self, message: str, *, group: str, op: str, channel: int, missing_ranks: list[int], waited_s: float
    ) -> None:
        super().__init__(message)
        self.group = group
        self.op = op
        self.channel = channel
        self.missing_ranks = missing_ranks
        self.waited_s = waited_s


class SyncMismatchError(SyncError):
    """Ranks called different things where all must call the same. The group is then broken for all of its
    ranks. It is raised at once where the calls meet in the same place; where ranks wait for one another in
    different places (a barrier and a collective, two channels), at the timeout, on the CPU.

    Attributes:
        group: name of the group.
        calls: what each rank called last, indexed by rank. The message says which rank has not come yet.
    """

    def __init__(self, message: str, *, group: str, calls: list[str]) -> None:
        super().__init__(message)
        self.group = group
        self.calls = calls


class _Reason(IntEnum):
    """csrc/cpu/pages.h, enum class Reason."""

    NONE = 0
    TIMEOUT = 1
    MISMATCH = 2
    INTERRUPTED = 3
    BAD_OFFSET = 4
    RESET = 5
    CROSSED = 6
    BAD_GRID = 7


def failure(group: str, message: str | None = None) -> SyncError | None:
    """The error that says why ``group`` is broken, its text ``message`` if given; None while it is whole."""
    numbers, texts = torch.ops.gpusync._failure(group)
    if not numbers:
        return None
    reason, _rank, channel, waited_us, *missing = numbers
    text, op, *calls = texts
    message = message or f"gpusync: group '{group}' is broken: {text}"
    if reason in (_Reason.TIMEOUT, _Reason.NONE):
        return SyncTimeoutError(
            message, group=group, op=op, channel=channel, missing_ranks=missing, waited_s=waited_us / 1e6
        )
    if reason in (_Reason.MISMATCH, _Reason.CROSSED):
        return SyncMismatchError(message, group=group, calls=calls)
    return SyncError(message)


def translate(error: RuntimeError, group: str) -> RuntimeError:
    """The error class that fits what an op of ``group`` threw; errors not of gpusync stay as they are."""
    message = str(error)
    start = message.find("gpusync: ")
    if start < 0:
        return error
    message = re.split(r"\nException raised from ", message[start:], maxsplit=1)[0]
    if "is broken" in message or "stays broken" in message:
        return failure(group, message) or SyncError(message)
    return SyncError(message)

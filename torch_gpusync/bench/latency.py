"""The physical floor of whatever ranks on GPUs tell one another: a word's way to the peer and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_gpusync import SyncGroup
from torch_gpusync.ops import ops

from .timing import Series

_ROUND_TRIPS = 1000
_FLAVOURS = (("gpusync relaxed", False), ("gpusync release/acquire", True))


def round_trips(
    sync: SyncGroup,
    samples: int,
    meet: Callable[[], None],
    agree: Callable[[float], float],
    progress: Callable[[str], None],
) -> list[Series]:
    """Microseconds that a number takes from rank 0 to rank 1 and back, through a word in the memory of each, inside one
    kernel. All ranks call it; half of it is what a store takes until the peer sees it. A flavour in which a rank gave up
    waiting for the other is left out.
    """
    if sync.world_size < 2:
        return []
    first = 1
    result = []
    for impl, fence in _FLAVOURS:
        progress(f"a word there and back, {impl}")
        taken = []
        for _ in range(samples):
            meet()
            taken.append(_nanoseconds(sync, first, fence))
            first += _ROUND_TRIPS + 1
        if agree(max(float(ns < 0) for ns in taken)):
            progress(f"{impl} is left out: a rank waited for the other in vain")
            continue
        microseconds = [ns / 1e3 / _ROUND_TRIPS for ns in taken]
        result.append(Series("round trip", impl, "kernel", False, _ROUND_TRIPS, microseconds))
    return result


def _nanoseconds(sync: SyncGroup, first: int, fence: bool) -> int:
    """0 on ranks that take no part."""
    if sync.rank > 1:
        return 0
    ns = ops._cuda_ping_pong(sync.token, sync.name, 1 - sync.rank, first, _ROUND_TRIPS, fence)
    assert isinstance(ns, torch.Tensor)
    return int(ns.item())

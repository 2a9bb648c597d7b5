"""Barrier and all-reduce latency of a group beside Gloo's, measured by the same processes in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_gpusync import SyncGroup

_ROUNDS = 5  # the two libraries take turns, so that a disturbance of the machine meets both
_CALLS = 20  # timed calls in a round
_WARM_UP = 3


def measure(sync: SyncGroup, shape: tuple[int, ...], device: torch.device) -> dict[str, float]:
    """Median seconds per eager call on this rank, by ``"barrier gpusync"``, ``"all_reduce gloo"`` and so on.

    ``shape``: of the fp32 tensor that is summed. The default process group must be Gloo's with the ranks of
    ``sync``. Raises AssertionError when the two libraries' sums differ by more than rounding.
    """
    mine = torch.randn(shape, generator=torch.Generator().manual_seed(sync.rank)).to(device)
    theirs = mine.clone()
    dist.all_reduce(theirs)
    torch.testing.assert_close(sync.all_reduce(mine), theirs, rtol=1e-5, atol=1e-5)
    theirs.zero_()  # summed in place again and again
    calls: dict[str, Callable[[], object]] = {
        "barrier gpusync": sync.barrier,
        "barrier gloo": dist.barrier,
        "all_reduce gpusync": lambda: sync.all_reduce(mine),
        "all_reduce gloo": lambda: dist.all_reduce(theirs),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            for i in range(_WARM_UP + _CALLS):
                begin = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if i >= _WARM_UP:
                    samples[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in samples.items()}

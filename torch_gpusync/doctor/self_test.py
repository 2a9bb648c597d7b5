"""Two ranks, as real processes, that make a group, meet, and sum."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .finding import Finding, one_line

if TYPE_CHECKING:
    from torch_gpusync.bench.launcher import Context

_CALLS = 2000
_LIMIT_S = 60.0


def self_test() -> Iterator[Finding]:
    """Does it work, and how fast?"""
    section = "self-test"
    try:
        from torch_gpusync.bench.launcher import RankFailure, launch
    except Exception as error:
        yield Finding(
            section, "two ranks", "bad", f"cannot start: {one_line(error)}", "see the findings above"
        )
        return
    start = time.perf_counter()
    try:
        latencies: list[tuple[float, float]] = launch(
            two_ranks, 2, None, timeout_s=_LIMIT_S / 2, silence_s=_LIMIT_S
        )
    except RankFailure as failure:
        yield Finding(section, "two ranks", "bad", " ".join(str(failure).split()), _advice_for(str(failure)))
        return
    yield Finding(
        section, "two ranks", "ok", f"met and summed right ({time.perf_counter() - start:.1f} s in all)"
    )
    barrier, all_reduce = (max(values) for values in zip(*latencies, strict=True))
    yield Finding(section, "barrier", "ok", f"{barrier:.1f} µs")
    yield Finding(section, "all_reduce of 4 KiB", "ok", f"{all_reduce:.1f} µs")


def _advice_for(failure: str) -> str:
    if "memory" in failure or "space" in failure:
        return "give the container more memory or /dev/shm"
    if "SyncTimeoutError" in failure or "reported nothing" in failure:
        return "ranks do not run or do not see one another's memory: look at the load and at the sandbox"
    return "the ranks run, but not the library: see the findings above"


def two_ranks(context: Context, _: None) -> tuple[float, float]:
    """The body of the self-test: microseconds per barrier and per all-reduce of 4 KiB, on this rank."""
    import torch

    from torch_gpusync import SyncGroup

    context.init_process_group()
    sync = SyncGroup(timeout=context.timeout_s)
    try:
        x = torch.arange(1024, dtype=torch.float32) + sync.rank
        expected = sum(torch.arange(1024, dtype=torch.float32) + rank for rank in range(sync.world_size))
        for _call in range(_CALLS // 10):
            assert torch.equal(sync.all_reduce(x), torch.as_tensor(expected)), "all_reduce gave a wrong sum"
        return _microseconds(sync.barrier), _microseconds(lambda: sync.all_reduce(x))
    finally:
        sync.close()


def _microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / _CALLS

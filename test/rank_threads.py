"""Threads as ranks, and the error that reports ranks, threads or processes, which went wrong."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any


class RankError(AssertionError):
    """At least one rank did not do what it should.

    Attributes: `failed` maps each failed rank to a one-line reason; `stuck` lists the ranks that were still
    running when they were ended. The text adds tracebacks, stacks and the tail of each such rank's output.
    """

    def __init__(self, text: str, failed: Mapping[int, str], stuck: Collection[int]) -> None:
        super().__init__(text)
        self.failed = dict(failed)
        self.stuck = sorted(stuck)


def run_threads(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs `fn(rank, *args)` in `n` threads of this process and returns the results, one per rank.

    Raises RankError with a traceback of each rank that raised, and at the deadline with the stack of each
    that is stuck. A stuck thread cannot be ended: where a wait may be unbounded, call this inside
    `run_ranks(..., 1)`.
    """
    results: list[Any] = [None] * n
    errors: dict[int, tuple[str, str]] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank, *args)
        except BaseException as error:
            last = traceback.format_exception_only(type(error), error)[-1].strip()
            errors[rank] = (f"raised {last}", traceback.format_exc())

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, started + timeout - time.monotonic()))
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for rank in stuck:
        frame = sys._current_frames().get(threads[rank].ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "no Python frame\n"
        errors[rank] = (f"stuck: no result after {time.monotonic() - started:.1f} s", stack)
    if errors:
        parts = [f"{len(errors)} of {n} ranks (threads) failed"]
        parts += [f"rank {rank} {reason}" for rank, (reason, _) in sorted(errors.items())]
        parts += [
            f"--- rank {rank} {reason}\n{detail.rstrip()}"
            for rank, (reason, detail) in sorted(errors.items())
        ]
        raise RankError("\n".join(parts), {rank: reason for rank, (reason, _) in errors.items()}, stuck)
    return results

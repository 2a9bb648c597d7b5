"""Threads as ranks, and the error that reports ranks, threads or processes, which went wrong."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

# Seconds that the other ranks get to finish after one has failed.
GRACE = 5.0


class RankError(AssertionError):
    """At least one rank did not do what it should.

    The text names each such rank and says what became of it, then adds its traceback, its stacks or the tail of
    its output.

    Attributes:
        failed: maps each failed rank to a one-line reason.
        stuck: sorted; the ranks that were still running when they were ended.
    """

    def __init__(self, text: str, failed: Mapping[int, str], stuck: Collection[int]) -> None:
        super().__init__(text)
        self.failed = dict(failed)
        self.stuck = sorted(stuck)

    def __reduce__(self) -> Any:
        return RankError, (str(self), self.failed, self.stuck)


def run_threads(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``n`` threads of this process, all at once.

    Args:
        fn: any callable; a closure will do.
        timeout: seconds for everything. After a rank has failed the others get 5 seconds.

    Returns:
        What ``fn`` returned, one for each rank.

    Raises:
        RankError: with a traceback of each rank that raised, and the stack of each that is stuck. A stuck thread
            cannot be ended and goes on beside the caller: where a wait may have no bound of its own, call this
            inside ``run_ranks(..., 1)``.
    """
    results: list[Any] = [None] * n
    errors: dict[int, tuple[str, str]] = {}
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank, *args)
        except BaseException as error:
            last = traceback.format_exception_only(type(error), error)[-1].strip()
            errors[rank] = (f"raised {last}", traceback.format_exc())
        ended.put(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)
    ]
    started = time.monotonic()
    deadline, hurried = started + timeout, False
    for thread in threads:
        thread.start()
    stuck = set(range(n))
    while stuck:
        try:
            stuck.remove(ended.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            break
        if errors and not hurried:
            deadline, hurried = min(deadline, time.monotonic() + GRACE), True
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
    for thread in threads:  # they have put their results; let them leave
        thread.join(GRACE)
    return results

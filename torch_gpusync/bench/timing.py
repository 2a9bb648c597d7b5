"""How calls are timed: subjects take turns, sample by sample, and every sample starts from a barrier.

Within a round each subject gives one sample of so many calls that it lasts ``sample_s``; peers go first, and
once more at the end. So a disturbance of the machine meets all of them. No sample inherits the end of the one
before: after a Gloo barrier, for one, ranks start milliseconds apart, and a sample of a few hundred fast
calls would mostly measure that.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

_MIN_CALLS = 3
_MAX_CALLS = 1_000_000


@dataclass(frozen=True)
class Sampling:
    """How much is measured."""

    rounds: int = 9
    sample_s: float = 0.2


def _ignore() -> None:
    pass


@dataclass
class Subject:
    """One implementation of one op, ready to be called with its arguments."""

    op: str
    impl: str
    call: Callable[[], object]
    mode: str = "eager"
    is_peer: bool = False
    ops_per_call: int = 1  # a compiled function or a graph runs the op several times
    refresh: Callable[[], None] = _ignore  # fresh data, before every sample
    check: Callable[[], None] = _ignore  # raises AssertionError when a call's result is wrong


@dataclass
class Series:
    """One rank's samples of a subject, in microseconds per op."""

    op: str
    impl: str
    mode: str
    is_peer: bool
    ops_per_sample: int
    samples_us: list[float] = field(default_factory=list)


Timer = Callable[[Callable[[], object], int], float]  # runs the call so often; seconds that it took


def host_timer(call: Callable[[], object], calls: int) -> float:
    """The time on the host: right for what returns when it is done."""
    turns = repeat(None, calls)
    start = time.perf_counter()
    for _ in turns:
        call()
    return time.perf_counter() - start


def measure(
    subjects: Sequence[Subject],
    sampling: Sampling,
    *,
    timer: Timer,
    meet: Callable[[], None],
    agree: Callable[[float], float],
    progress: Callable[[str], None],
) -> list[Series]:
    """Time ``subjects`` in turn and then check each one's result. All ranks call it with the same subjects.

    ``meet`` lets the ranks start together; ``agree`` returns the greatest of what the ranks pass.
    """
    calls = [_calls_per_sample(subject, sampling, timer, meet, agree) for subject in subjects]
    series = [
        Series(s.op, s.impl, s.mode, s.is_peer, n * s.ops_per_call)
        for s, n in zip(subjects, calls, strict=True)
    ]
    turns = list(zip(subjects, calls, series, strict=True))
    peers = [turn for turn in turns if turn[0].is_peer]
    ours = [turn for turn in turns if not turn[0].is_peer]
    gc.collect()
    gc.disable()
    try:
        for index in range(sampling.rounds + 1):
            for subject, n, out in peers if index == sampling.rounds else peers + ours:
                out.samples_us.append(_sample(subject, n, timer, meet))
            progress(f"round {index + 1} of {sampling.rounds + 1}")
    finally:
        gc.enable()
    for subject in subjects:
        meet()
        subject.check()
    return series


def _sample(subject: Subject, calls: int, timer: Timer, meet: Callable[[], None]) -> float:
    subject.refresh()
    meet()
    timer(subject.call, max(1, calls // 20))  # caches, branch predictors and the scheduler get used to it
    meet()
    return 1e6 * timer(subject.call, calls) / (calls * subject.ops_per_call)


def _calls_per_sample(
    subject: Subject,
    sampling: Sampling,
    timer: Timer,
    meet: Callable[[], None],
    agree: Callable[[float], float],
) -> int:
    """So many that a sample takes ``sample_s``; the slowest rank decides for all."""
    subject.refresh()
    calls = 1
    while True:
        meet()
        elapsed = agree(timer(subject.call, calls))
        if calls > 1 and elapsed > sampling.sample_s / 10:
            break
        if elapsed > sampling.sample_s or calls >= _MAX_CALLS:
            break
        calls *= 4
    return min(max(math.ceil(calls * sampling.sample_s / elapsed), _MIN_CALLS), _MAX_CALLS)

"""Ranks that are late, each at random and all of it again at the next run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_gpusync.testing._tap import observe


@contextmanager
def skewed(seconds: float, rank: int, *, seed: int = 0, namespaces: tuple[str, ...] = ()) -> Iterator[None]:
    """Make this thread late: sleep before each gpusync op that it runs, eager or compiled.

    How long the k-th op of a rank waits depends on ``seed``, ``rank`` and k alone, so a run can be repeated. Backward
    passes are part of it; other threads are not, nor are replays of CUDA graphs, which run no op on the host.

    Args:
        seconds: the longest sleep; each is drawn between 0 and that, and every other op waits not at all.
        namespaces: further libraries whose ops wait, as in ``torch.ops.NAMESPACE``.
    """
    draw = random.Random(f"{seed}/{rank}")

    def be_late(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0.0, seconds))
        return _nothing

    with observe(be_late, ("gpusync", *namespaces)):
        yield


def _nothing(result: Any) -> None:
    pass

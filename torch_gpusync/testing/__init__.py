"""For tests of code that synchronises ranks, with this library or any other: docs/testing.md has examples.

* :func:`ranks` decorates a test that every rank runs; pytest calls it like any other.
* :func:`check_order` tells whether compiled code runs the communication ops that eager mode runs.
* :func:`run_ranks` makes ranks of processes, :func:`run_threads` of threads, both under a watchdog.
* :func:`skewed` makes a rank late, and :func:`executed_ops` logs the communication ops that it runs.

Importing torch_gpusync does not import this.
"""

from torch_gpusync.testing._log import ExecutedOp, executed_ops
from torch_gpusync.testing._order import OrderError, check_order
from torch_gpusync.testing._processes import COMPILER, PRELOAD, Lost, run_ranks
from torch_gpusync.testing._ranks import ranks
from torch_gpusync.testing._skew import skewed
from torch_gpusync.testing._threads import RankError, run_threads

__all__ = [
    "COMPILER",
    "PRELOAD",
    "ExecutedOp",
    "Lost",
    "OrderError",
    "RankError",
    "check_order",
    "executed_ops",
    "ranks",
    "run_ranks",
    "run_threads",
    "skewed",
]

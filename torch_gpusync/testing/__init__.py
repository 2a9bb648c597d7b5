"""For tests of code that synchronises ranks, with this library or any other: docs/testing.md has examples.

* :func:`run_ranks` makes ranks of processes, :func:`run_threads` of threads, both under a watchdog.

Importing torch_gpusync does not import this.
"""

from torch_gpusync.testing._processes import COMPILER, PRELOAD, Lost, run_ranks
from torch_gpusync.testing._threads import RankError, run_threads

__all__ = [
    "COMPILER",
    "PRELOAD",
    "Lost",
    "RankError",
    "run_ranks",
    "run_threads",
]

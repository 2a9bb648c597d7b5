"""Session-wide rules: every test ends under a watchdog, and Inductor compiles into a folder of this session; and the
fixture that several files use.

The environment is set before torch is imported, here and (by inheritance) in the forkserver that makes the
ranks.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing import forkserver

import pytest

_TEST_LIMIT = 400.0  # seconds; `run_ranks` has a tighter one of its own, this catches what hangs outside it

# A folder of an earlier session could hide that a compilation goes wrong, or serve code compiled for another
# schema.
_cache = tempfile.mkdtemp(prefix="gpusync-inductor-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in process: no pool of workers per rank
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # trust /proc/cpuinfo: probing costs seconds in every process

# A shell ignores it for what it starts in the background, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

from torch_gpusync import SyncGroup, testing, virtual_ranks  # noqa: E402  (after the environment is set)

testing.PRELOAD += [name for name in testing.COMPILER if name not in testing.PRELOAD]

_stderr = 2


def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    config.addinivalue_line("markers", "limit(seconds): how long the watchdog lets this test run")
    # The terminal's: during a test descriptor 2 is captured, and a forced exit loses what it holds.
    _stderr = os.dup(2)


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process has one forkserver, with what its first user preloads: that must be the harness, not the benchmark."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOAD)
    forkserver.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Set-up, test and teardown together get a limit; past it all stacks are printed and the process exits.

    The ranks' processes end with this one.
    """
    marker = item.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else _TEST_LIMIT
    faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def three() -> Iterator[list[SyncGroup]]:
    """Virtual ranks 0 to 2 of one group."""
    ranks = virtual_ranks(3, timeout=20.0)
    yield ranks
    for sync in ranks:
        sync.close()

"""Tests that need a GPU: run_gpu_tests.py runs them (`make test-gpu`), `make test` never does.

GPUSYNC_TEST_DEVICE names the device. With `cpu` the tests whose bodies do not depend on it run on CPU groups,
which is how they are tried out where there is no GPU.
"""

from __future__ import annotations

import os

import pytest

from torch_gpusync import testing

_DEVICE = os.environ.get("GPUSYNC_TEST_DEVICE", "")

collect_ignore_glob = {"cuda": [], "cpu": ["test_gpu_[!o]*.py"]}.get(_DEVICE, ["test_gpu_*.py"])

if _DEVICE and "GPUSYNC_TEST_PRELOAD" not in os.environ:  # (`make test` reads this file too)
    # Ranks are forked from a process that must not have touched CUDA, and importing a compiler may: the runner tries.
    testing.PRELOAD[:] = [name for name in testing.PRELOAD if name not in testing.COMPILER]

_TEST_LIMIT = 100.0  # seconds for a test that names no limit of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_gpu_") and item.get_closest_marker("limit") is None:
            item.add_marker(pytest.mark.limit(_TEST_LIMIT))


class _AtOnce:
    """Tells what has failed when it fails: a watchdog may end the session before pytest would."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(
                f"\n{report.nodeid} took {report.duration:.1f} s:\n{report.longreprtext[-3000:]}"
            )


def pytest_configure(config: pytest.Config) -> None:
    if _DEVICE:
        config.pluginmanager.register(_AtOnce(config))

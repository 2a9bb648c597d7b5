"""`@ranks` in a test suite of somebody else's: pytest in a folder of its own, without this project's conftest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_gpusync
from torch_gpusync import SyncGroup
from torch_gpusync.testing import RankError, _skew, ranks, skewed
from torch_gpusync.testing._tap import observers

_SUITE = """
import functools, os, signal, threading, time
from pathlib import Path

import pytest, torch
import torch.distributed as dist
from torch_gpusync.testing import ranks

@pytest.fixture
def offset():
    return 10

def logged(fn):
    @functools.wraps(fn)
    def outer(*args, **kwargs):
        return fn(*args, **kwargs)
    return outer

@ranks(3)
def test_passes(sync, rank, world_size):
    assert (sync.rank, sync.world_size, world_size, dist.get_world_size()) == (rank, 3, 3, 3)
    assert sync.all_reduce(torch.tensor([rank])).item() == 3

@ranks(3, "virtual")
def test_passes_virtual(sync, rank):
    assert sync.rank == rank and threading.current_thread() is not threading.main_thread()
    assert sync.all_reduce(torch.tensor([rank])).item() == 3

@logged
@ranks(2, kind="virtual", channels=3, group_timeout=7.0)
def test_options(sync):
    sync.barrier(2)
    assert sync.channels == 3 and sync.timeout == 7.0

@pytest.mark.parametrize("factor", [1, 2])
@ranks(2, env={"GPUSYNC_USER": "yes"})
def test_fixtures(rank, sync, offset, factor, tmp_path):
    assert os.environ["GPUSYNC_USER"] == "yes"
    (tmp_path / f"{rank}").write_text("here")
    sync.barrier()
    assert len(list(tmp_path.iterdir())) == 2 and offset == 10 and factor in (1, 2)

class TestClass:
    value = 5

    @ranks(2, "virtual")
    def test_method(self, sync, offset):
        assert sync.all_reduce(torch.tensor([self.value + offset])).item() == 30

@ranks(2, "virtual")
def test_skips(rank):
    pytest.skip("not today")

@ranks(3)
def test_fails(sync):
    if sync.rank == 1:
        raise ValueError("seven")
    sync.barrier()

@ranks(3, "virtual")
def test_fails_virtual(rank):
    print("before it fails")
    assert rank != 1, "rank one is wrong"

@ranks(3, timeout=30, group_timeout=2.0)
def test_hangs(sync):
    while sync.rank == 2:
        time.sleep(0.1)
    sync.all_reduce(torch.ones(3))

@ranks(3, "virtual", timeout=6)
def test_hangs_virtual(rank):
    while rank == 2:
        time.sleep(0.1)

@ranks(3)
def test_dies(sync):
    if sync.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sync.barrier()

@ranks(3, "virtual")
def test_dies_virtual(rank):
    if rank == 2:
        os._exit(3)
    time.sleep(20)

@ranks(2)
def test_cannot_travel(sync, capsys, request):
    pass
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """What pytest printed about the suite above, and each test's outcome."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "test_users.py").write_text(_SUITE)
    # Names that no path leads to: the ranks have to find the module by its file.
    printed = _pytest(folder, "--import-mode=importlib", "-v", "--tb=short")
    return printed, dict(re.findall(r"^test_users\.py::(\S+) ([A-Z]+)", printed, re.MULTILINE))


def _pytest(folder: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder, env=env)
    return done.stdout + done.stderr


def _failure(printed: str, test: str) -> str:
    return printed.split(f" {test} _")[1].split("\n____")[0]


def test_outcomes(suite: tuple[str, dict[str, str]]) -> None:
    printed, outcomes = suite
    assert outcomes == {
        "test_passes": "PASSED",
        "test_passes_virtual": "PASSED",
        "test_options": "PASSED",
        "test_fixtures[1]": "PASSED",
        "test_fixtures[2]": "PASSED",
        "TestClass::test_method": "PASSED",
        "test_skips": "SKIPPED",
        "test_fails": "FAILED",
        "test_fails_virtual": "FAILED",
        "test_hangs": "FAILED",
        "test_hangs_virtual": "FAILED",
        "test_dies": "FAILED",
        "test_dies_virtual": "FAILED",
        "test_cannot_travel": "FAILED",
    }, printed
    assert "not today" in printed


@pytest.mark.parametrize(
    ("test", "texts"),
    [
        ("test_fails", ["rank 1 raised ValueError: seven", "in test_fails"]),
        (
            "test_fails_virtual",
            ["1 of 3 ranks", "rank 1 raised AssertionError: rank one is wrong", "before it fails"],
        ),
        (
            "test_hangs",
            ["rank 2 stuck: no result after ", "in test_hangs", "waited 2.0 s for rank 2 ("],
        ),
        (
            "test_hangs_virtual",
            ["rank 2 stuck: no result after 4.", "time.sleep(0.1)", "in test_hangs_virtual"],
        ),
        ("test_dies", ["rank 0 was killed by SIGKILL", "for rank 0 (global 0", ", dead;"]),
        ("test_dies_virtual", ["all 3 ranks failed: their process exited with code 3 and no result"]),
        (
            "test_cannot_travel",
            ["argument capsys of test_cannot_travel", "cannot go to the ranks' processes"],
        ),
    ],
)
def test_a_failure_says_which_rank_and_why(
    suite: tuple[str, dict[str, str]], test: str, texts: list[str]
) -> None:
    report = _failure(suite[0], test)
    assert [text for text in texts if text not in report] == [], report


async def _coroutine(sync: SyncGroup) -> None:
    raise AssertionError


def _generator(sync: SyncGroup) -> Iterator[None]:
    yield


def test_functions_that_ranks_cannot_find_are_refused_at_once() -> None:
    def inner(sync: SyncGroup) -> None:
        pass

    with pytest.raises(
        TypeError, match=r"every rank imports the test, and '.*inner' is defined inside another"
    ):
        ranks(2)(inner)
    for test in (_coroutine, _generator):
        with pytest.raises(TypeError, match="a coroutine or a generator, whose body no rank would run"):
            ranks(2)(test)
    with pytest.raises(TypeError, match="a lambda has no name"):
        ranks(2, "virtual")(lambda sync: None)
    with pytest.raises(TypeError, match="from 1, not 0"):
        ranks(0)
    with pytest.raises(TypeError, match="use 'processes' or 'virtual', not 'threads'"):
        ranks(2, "threads")  # type: ignore[arg-type]


def _naps(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None], rank: int, seed: int) -> list[float]:
    naps: list[float] = []
    monkeypatch.setattr(_skew, "time", SimpleNamespace(sleep=naps.append))
    with skewed(0.5, rank, seed=seed):
        for _ in range(20):
            function()
    return naps


def test_skew_is_of_each_rank_and_the_same_at_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    [sync] = torch_gpusync.virtual_ranks(1, timeout=20.0)

    def two_ops() -> None:
        sync.barrier()
        sync.signal(0)

    naps = _naps(monkeypatch, two_ops, 1, 5)
    assert 8 < len(naps) < 32 and min(naps) > 0.0 and 0.3 < max(naps) <= 0.5  # of 40
    assert naps == _naps(monkeypatch, two_ops, 1, 5)
    assert naps == _naps(monkeypatch, torch.compile(two_ops, backend="aot_eager"), 1, 5)
    assert naps != _naps(monkeypatch, two_ops, 2, 5) != _naps(monkeypatch, two_ops, 2, 6)
    two_ops()
    assert observers() == ()
    sync.close()


@ranks(3, skew={1: 0.01, 2: 0.0})
def test_skew_of_one_rank(sync: SyncGroup, rank: int) -> None:
    assert len(observers()) == (rank == 1)
    for _ in range(10):
        sync.barrier()


@ranks(3, "virtual", skew=0.001, seed=7)
def test_skew_of_all_ranks(sync: SyncGroup) -> None:
    assert len(observers()) == 1
    for _ in range(10):
        sync.barrier()


@ranks(3)
def _meets(rank: int, extra: list[int]) -> None:
    gathered: list[Any] = [None] * 3
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1, 2] and extra == [1]
    if rank == 2:
        raise KeyError("two")


def test_a_decorated_function_needs_no_pytest() -> None:
    with pytest.raises(RankError, match="rank 2 raised KeyError: 'two'") as caught:
        _meets(extra=[1])
    assert caught.value.failed == {2: "raised KeyError: 'two'"} and caught.value.stuck == []

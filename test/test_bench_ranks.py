"""The benchmark's ranks: they return results, a lost one is named, and none outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_gpusync.bench.launcher import Context, RankFailure, launch

# ---- ranks


def _report(context: Context, argument: str) -> tuple[int, int, str, int]:
    context.progress("here")
    return context.rank, context.world_size, argument, torch.get_num_threads()


class _Fatal:
    """As C++ objects are whose destructors throw: GPU memory after a failure of the GPU."""

    def __del__(self) -> None:
        os.abort()


def _misbehave(context: Context, how: str) -> None:
    if context.rank != 1:
        return
    if how == "raise and abort":
        fatal = _Fatal()
        raise KeyError(type(fatal).__name__)
    if how == "raise":
        raise KeyError("who")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    if how == "hang":
        threading.Event().wait(1000)


def test_ranks_return_in_order() -> None:
    said: list[str] = []
    results = launch(_report, 3, "x", on_progress=said.append)
    assert results == [(0, 3, "x", 1), (1, 3, "x", 1), (2, 3, "x", 1)]
    assert said == ["here"] * 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 raised KeyError: 'who'"),
        ("raise and abort", "rank 1 raised KeyError: '_Fatal'"),
        ("kill", "rank 1, without a result, was killed by SIGKILL"),
        ("exit", "rank 1, without a result, exited with code 7"),
        ("hang", r"rank (0, )?1 reported nothing for 4 s and was ended"),
    ],
)
def test_a_rank_that_fails_is_named(how: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message) as caught:
        launch(_misbehave, 2, how, silence_s=4 if how == "hang" else 60)
    assert ("in _misbehave" in caught.value.details) == how.startswith("raise")


def _clean_up_badly(context: Context, how: str) -> int:
    context.init_process_group()
    if context.rank == 1:
        context.clean_up.callback({"hang": threading.Event().wait, "abort": os.abort}[how])
    return context.rank


@pytest.mark.parametrize(
    ("how", "message"), [("hang", "did not exit and was ended"), ("abort", "was killed by SIGABRT")]
)
def test_a_clean_up_that_fails_loses_no_result(how: str, message: str) -> None:
    """As NCCL's, which waits for graphs that hold work of a communicator, and throws where nobody catches."""
    said: list[str] = []
    assert launch(_clean_up_badly, 3, how, on_progress=said.append) == [0, 1, 2]
    assert said == [f"rank 1, its result reported, {message}"]


def _clean_up_in_order(context: Context, path: str) -> None:
    context.clean_up.callback(lambda: Path(path).write_text(str(torch.distributed.is_initialized())))
    context.init_process_group()
    context.clean_up.callback(
        lambda: Path(path + ".before").write_text(str(torch.distributed.is_initialized()))
    )


def test_the_clean_up_goes_backwards(tmp_path: Path) -> None:
    launch(_clean_up_in_order, 1, str(tmp_path / "there"))
    assert [(tmp_path / name).read_text() for name in ("there.before", "there")] == ["True", "False"]


def _announce_and_hang(context: Context, path: str) -> None:
    Path(f"{path}.{context.rank}").write_text(str(os.getpid()))
    threading.Event().wait(1000)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_program(end: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "from test_bench_ranks import _announce_and_hang, launch\n"
        f"if __name__ == '__main__': launch(_announce_and_hang, 2, {str(tmp_path / 'pid')!r})\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.DEVNULL) as program:
        try:
            files = [tmp_path / "pid.0", tmp_path / "pid.1"]
            _until(lambda: all(f.exists() and f.read_text() for f in files), 60)
            program.send_signal(end)
            program.wait(30)
        finally:
            program.kill()
    pids = [int(f.read_text()) for f in files]
    _until(lambda: not any(_runs(pid) for pid in pids), 15)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

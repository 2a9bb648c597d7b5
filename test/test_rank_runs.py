"""The harness itself: a rank that raises, exits, dies or hangs is reported, and nothing outlives a test."""

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
import torch.distributed as dist

from torch_gpusync.testing import Lost, RankError, run_ranks, run_threads


def _sum_of_ranks(rank: int, offset: int) -> tuple[int, float, int]:
    x = torch.tensor([float(rank + offset)])
    dist.all_reduce(x)
    return rank, x.item(), torch.get_num_threads()


def _what_it_was_forked_from(rank: int) -> tuple[bool, int]:
    threads = Path(f"/proc/{os.getppid()}/task")
    return "torch._inductor.compile_fx" in sys.modules, len(list(threads.iterdir()))


def _misbehave(rank: int, how: str) -> int:
    # Gloo fails in a rank whose peer goes while it connects, and then that one is named as well.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected {rank}", "")
    if rank != 1:
        return rank
    store.wait([f"connected {r}" for r in range(dist.get_world_size())])
    if how == "raise":
        raise ValueError("seven")
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(4)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "crash after the result":
        dist.destroy_process_group = _exit_5
    if how == "hang":
        print("about to hang")
        _hang_here()
    return rank


def _exit_5(group: object = None) -> None:
    os._exit(5)


def _hang_here() -> None:
    threading.Event().wait(1000)


def _hang_in_collective(rank: int) -> None:
    if rank == 2:
        _hang_here()
    dist.barrier()


def _environment(rank: int) -> str | None:
    return os.environ.get("GPUSYNC_TEST_VALUE")


def _announce_and_hang(rank: int, path: str) -> None:
    Path(f"{path}.{rank}").write_text(str(os.getpid()))
    _hang_here()


def test_results_come_back_by_rank() -> None:
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 33.0, 1), (1, 33.0, 1), (2, 33.0, 1)]


def test_ranks_are_forked_from_a_clean_server() -> None:
    [(preloaded, threads)] = run_ranks(_what_it_was_forked_from, 1, process_group=False)
    assert threads == 1, "the forkserver has threads: a fork of it may hang"
    assert preloaded, "the forkserver did not import what ranks need: every rank takes seconds to start"


def test_environment_is_the_ranks_only() -> None:
    assert run_ranks(_environment, 2, process_group=False, env={"GPUSYNC_TEST_VALUE": "x"}) == ["x", "x"]
    assert "GPUSYNC_TEST_VALUE" not in os.environ


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "raised ValueError: seven"),
        ("exit", "exited with code 3 and no result"),
        ("sys.exit", "raised SystemExit: 4"),
        ("kill", "was killed by SIGKILL"),
        ("crash after the result", "returned a result, then exited with code 5"),
    ],
)
def test_a_rank_that_fails_is_named(how: str, reason: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_misbehave, 3, how, timeout=20)
    assert {rank: text[: len(reason)] for rank, text in caught.value.failed.items()} == {1: reason}
    assert caught.value.stuck == []
    if how == "raise":
        assert "in _misbehave" in str(caught.value)


def test_a_rank_that_hangs_is_dumped_and_named() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_misbehave, 3, "hang", timeout=3)
    assert caught.value.stuck == [1]
    assert "stuck: no result after 3." in caught.value.failed[1]
    assert "in _hang_here" in str(caught.value)
    assert "about to hang" in str(caught.value)


def test_a_stopped_rank_is_reported() -> None:
    with pytest.raises(RankError, match=r"no stack: process state T \(stopped\).*, the signal is pending"):
        run_ranks(_misbehave, 2, "stop", timeout=2)


def test_ranks_stuck_in_a_collective_are_all_named() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_hang_in_collective, 3, timeout=3)
    assert 2 in caught.value.stuck
    assert set(caught.value.failed) == {0, 1, 2}


def test_a_rank_may_be_meant_to_be_lost() -> None:
    assert run_ranks(_misbehave, 3, "kill", lost=[1]) == [0, Lost(-signal.SIGKILL), 2]
    assert run_ranks(_misbehave, 3, "stop", lost=[1]) == [0, Lost(-signal.SIGKILL), 2]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_test_process(end: signal.Signals, tmp_path: Path) -> None:
    program = (
        "from test_rank_runs import _announce_and_hang, run_ranks\n"
        "if __name__ == '__main__':\n"
        f"    run_ranks(_announce_and_hang, 2, {str(tmp_path / 'pid')!r}, timeout=200)\n"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.DEVNULL) as parent:
        try:
            files = [tmp_path / "pid.0", tmp_path / "pid.1"]
            _until(lambda: all(f.exists() and f.read_text() for f in files), 90)
            pids = [int(f.read_text()) for f in files]
            parent.send_signal(end)
            parent.wait(20)
        finally:
            parent.kill()
    # The forkserver goes first, and takes its time to unload torch on a busy machine.
    _until(lambda: not any(_runs(pid) for pid in pids), 60)


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


def _thread_body(rank: int, barrier: threading.Barrier, late: int) -> int:
    if rank == late:
        _hang_here()
    barrier.wait(2 if late < 0 else 1000)
    return rank * rank


def _thread_raises(rank: int) -> None:
    if rank == 1:
        raise KeyError("who")


def test_threads() -> None:
    assert run_threads(_thread_body, 4, threading.Barrier(4), -1) == [0, 1, 4, 9]
    with pytest.raises(RankError, match=r"rank 1 raised KeyError: 'who'"):
        run_threads(_thread_raises, 3)


def test_stuck_threads_are_named() -> None:
    with pytest.raises(RankError) as caught:
        run_threads(_thread_body, 3, threading.Barrier(3), 2, timeout=1)
    assert caught.value.stuck == [0, 1, 2]
    assert "_hang_here" in str(caught.value)


_HANGING_TEST = """
import time, pytest
@pytest.mark.limit(1)
def test_hangs():
    time.sleep(60)
"""


def test_the_watchdog_ends_a_test_that_hangs_in_the_test_process(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(_HANGING_TEST)
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}  # where conftest.py finds the harness
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)
    assert done.returncode != 0
    assert "Timeout (0:00:01)!" in done.stderr
    assert "in test_hangs" in done.stderr

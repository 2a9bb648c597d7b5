"""The child side of `run_ranks`: what one rank's process does around the function under test.

A rank is forked from a forkserver that has imported torch and has run nothing, so it starts in milliseconds
and inherits no threads. It sends exactly one report through its pipe, waits for the parent's leave, and
exits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from torch_gpusync.testing._source import Source

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankSetup:
    """What a rank's process needs before the function runs; travels by pickle."""

    rank: int
    world_size: int
    source: Source  # of the function
    timeout: float  # seconds; also the process group's own timeout
    log: str  # file that takes stdout and stderr
    stacks: str  # file that takes the stacks of all threads on SIGUSR1
    store_port: int | None  # TCPStore on loopback; None: no process group
    backend: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A rank's one message: a pickled result, or the text of the exception that ended it."""

    result: bytes | None
    error: str | None  # "ValueError: text", last line of the traceback
    trace: str | None


def rank_main(setup: RankSetup, payload: bytes, pipe: Connection) -> None:
    """Runs the pickled `(fn, args)` as rank `setup.rank` and reports through `pipe`."""
    _contain(setup)
    try:
        _join_process_group(setup)
        setup.source.load()
        fn, args = pickle.loads(payload)
        report = Report(pickle.dumps(fn(setup.rank, *args)), None, None)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are results of a rank, too
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        report = Report(None, last, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(report))
    # Peers may still need this rank's sockets and memory: leave when the parent says that all have reported.
    try:
        pipe.recv_bytes()
    except EOFError:
        return
    _leave_process_group()


def _contain(setup: RankSetup) -> None:
    """Sees to it that nothing of this rank outlives the test, and that its output and stacks can be read."""
    # The forkserver ends when nobody holds its "alive" pipe any more. Ranks inherit it; without theirs, the
    # forkserver ends with the test process, however that ended, and this rank ends with the forkserver.
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()  # one signal to the session's process group also reaches a compiler that Inductor has started
    log = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2, all_threads=True)
    stacks = os.open(setup.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(setup.env)


def _join_process_group(setup: RankSetup) -> None:
    import torch

    torch.set_num_threads(1)  # ranks share few cores, and a rank that may fork must not own OpenMP threads
    if setup.store_port is None:
        return
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=setup.timeout)
    store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False, timeout=limit)
    dist.init_process_group(
        setup.backend, store=store, rank=setup.rank, world_size=setup.world_size, timeout=limit
    )


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()

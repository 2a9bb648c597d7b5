"""Processes as ranks, under a watchdog that ends them all and says what became of each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from torch_gpusync.testing._child import RankSetup, Report, rank_main
from torch_gpusync.testing._source import Source, complain_of_place
from torch_gpusync.testing._threads import GRACE, RankError

# What torch.compile imports on first use: seconds, for each rank that compiles.
COMPILER = [
    "torch._dynamo",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._subclasses.schema_check_mode",
    "torch.utils.cpp_extension",
]
# Modules that the process from which ranks are forked imports once, so that a rank costs a fork instead of seconds.
# Change the list before the first rank is made. Nothing in it may start a thread, compute, or touch a GPU; with
# some versions of torch for CUDA the compiler does, so it is part of the list for torch without CUDA only.
PRELOAD = ["torch", "torch.distributed", "torch_gpusync", "torch_gpusync.testing", "pytest"]
if torch.version.cuda is None:
    PRELOAD += COMPILER


@dataclass(frozen=True)
class Lost:
    """The result of a rank that was meant not to return.

    Attributes:
        exitcode: the process's; negative for the signal that ended it.
    """

    exitcode: int | None


class _Rank:
    """One rank's process as the parent sees it."""

    def __init__(self, setup: RankSetup, payload: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.setup = setup
        self.pipe: Connection
        self.pipe, theirs = context.Pipe(duplex=True)
        self.process: ForkServerProcess = context.Process(
            target=rank_main, args=(setup, payload, theirs), name=f"rank {setup.rank}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.report: Report | None = None
        self.reason: str | None = None  # set when the rank failed
        self.detail = ""
        self.stuck = False

    @property
    def settled(self) -> bool:
        return self.report is not None or self.reason is not None

    def receive(self) -> None:
        """Takes the report, or finds out how the rank died. Called when its pipe or its sentinel is ready."""
        try:
            self.report = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE)
            self.reason = _describe_exit(self.process.exitcode)
            return
        assert self.report is not None
        if self.report.error is not None:
            self.reason, self.detail = f"raised {self.report.error}", self.report.trace or ""

    def dump_and_stop(self, waited: float) -> None:
        """Ends a rank that did not report in time; its stacks say where it was."""
        self.stuck = True
        self.reason = f"stuck: no result after {waited:.1f} s"
        before = _size(self.setup.stacks)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)
        stopped = _process_state(self._pid).startswith("T")  # then it cannot dump
        limit = time.monotonic() + (0.0 if stopped else 2.0)
        size = before
        while time.monotonic() < limit:
            time.sleep(0.02)
            last, size = size, _size(self.setup.stacks)
            if size > before and size == last:
                break
        self.detail = _read(self.setup.stacks)[before:]
        if not self.detail:
            self.detail = f"no stack: process state {_process_state(self._pid)}{_obstacles(self._pid)}\n"
        self.kill()

    def dismiss(self) -> None:
        """Lets a rank that has reported leave; it fails the test if it cannot."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(b"leave")

    def await_exit(self, limit: float) -> None:
        self.process.join(max(0.0, limit - time.monotonic()))
        if self.reason is not None:
            return
        if self.process.exitcode is None:
            self.dump_and_stop(GRACE)
            self.reason = "returned a result, then did not exit"
        elif self.process.exitcode != 0:
            self.reason = f"returned a result, then {_describe_exit(self.process.exitcode)}"

    def kill(self) -> None:
        if self.process.exitcode is None:
            for end in (os.killpg, os.kill):  # the process group exists only once the rank has called setsid
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(self._pid, signal.SIGKILL)
            self.process.join(GRACE)

    def close(self) -> None:
        self.kill()
        self.pipe.close()
        self.process.close()

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    process_group: bool = True,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    lost: Collection[int] = (),
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``world_size`` new processes, all at once.

    A rank's process is forked from one that has imported torch and has run nothing: it starts in milliseconds and
    inherits neither threads nor what this process has set up. It has one OpenMP thread. No rank outlives the call,
    nor this process.

    Args:
        fn: a function at the top level of a module (or a method of a class there); it, ``args`` and what it returns
            travel by pickle.
        timeout: seconds for everything. After a rank has failed the others get 5 seconds.
        process_group: give the ranks a c10d process group, over a TCPStore that this process hosts on loopback.
        backend: its back end.
        env: set in the ranks before ``fn`` is imported.
        lost: ranks that are meant not to return: they may die or hang, are ended when the others are done, and
            yield ``Lost``.

    Returns:
        What ``fn`` returned, one for each rank.

    Raises:
        RankError: a rank raised, exited, was killed, hung (it is ended then), or did not exit after it had returned.
        TypeError: ``fn`` or ``args`` cannot travel.
    """
    __tracebackhide__ = True  # pytest: the ranks' own tracebacks say more
    return launch(
        Source.of(fn),
        fn,
        world_size,
        args,
        timeout=timeout,
        process_group=process_group,
        backend=backend,
        env=env,
        lost=lost,
    )


def launch(
    source: Source,
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    *,
    timeout: float,
    process_group: bool = True,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    lost: Collection[int] = (),
) -> list[Any]:
    """`run_ranks`, where the module that the ranks have to import is named: `fn` need not be in it."""
    __tracebackhide__ = True
    payload = _pack(fn, args)
    started = time.monotonic()
    ranks: list[_Rank] = []
    with (
        tempfile.TemporaryDirectory(prefix="gpusync-ranks-") as folder,
        _store(process_group, timeout) as port,
    ):
        try:
            for rank in range(world_size):
                log, stacks = f"{folder}/{rank}.log", f"{folder}/{rank}.stacks"
                setup = RankSetup(rank, world_size, source, timeout, log, stacks, port, backend, env or {})
                ranks.append(_Rank(setup, payload))
            _collect(ranks, started, started + timeout, lost)
            _raise_failures(ranks, lost)
            return [Lost(r.process.exitcode) if r.report is None else _result(r.report) for r in ranks]
        finally:  # also on Ctrl-C
            for each in ranks:
                each.close()


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    why = complain_of_place(fn)
    try:
        if not why:
            return pickle.dumps((fn, args))
    except Exception as error:  # whatever a __reduce__ raises
        why = f"{type(error).__name__}: {error}"
    raise TypeError(
        f"the function of the ranks and its arguments go to other processes by pickle, and cannot ({why}): define the "
        "function at the top level of a module and pass numbers, strings, tensors and the like"
    )


def _collect(ranks: list[_Rank], started: float, deadline: float, lost: Collection[int]) -> None:
    """Waits until all needed ranks have settled; ends the others at the deadline, or soon after a failure."""
    needed = [r for r in ranks if r.setup.rank not in lost]
    hurried = False
    while any(not r.settled for r in needed):
        if not hurried and any(r.reason is not None for r in needed):
            deadline, hurried = min(deadline, time.monotonic() + GRACE), True
        left = deadline - time.monotonic()
        if left <= 0:
            break
        running = [r for r in ranks if not r.settled]
        ready = wait([r.pipe for r in running] + [r.process.sentinel for r in running], timeout=left)
        for r in running:
            if r.pipe in ready or r.process.sentinel in ready:
                r.receive()
    for r in needed:
        if not r.settled:
            r.dump_and_stop(time.monotonic() - started)
    for r in ranks:
        if r.report is None:
            r.kill()
        else:
            r.dismiss()
    limit = time.monotonic() + GRACE
    for r in needed:
        if r.report is not None:
            r.await_exit(limit)


def _raise_failures(ranks: list[_Rank], lost: Collection[int]) -> None:
    __tracebackhide__ = True
    bad = [r for r in ranks if r.reason is not None and not (r.setup.rank in lost and r.report is None)]
    if not bad:
        return
    parts = [f"{len(bad)} of {len(ranks)} ranks failed"]
    parts += [f"rank {r.setup.rank} {r.reason}" for r in bad]
    for r in bad:
        parts.append(f"--- rank {r.setup.rank} {r.reason}\n{r.detail.rstrip()}")
        if tail := "\n".join(_read(r.setup.log).splitlines()[-40:]):
            parts.append(f"--- rank {r.setup.rank}, its last output:\n{tail}")
    stuck = [r.setup.rank for r in bad if r.stuck]
    raise RankError("\n".join(parts), {r.setup.rank: r.reason or "" for r in bad}, stuck)


def _result(report: Report) -> Any:
    assert report.result is not None
    return pickle.loads(report.result)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its pipe and is still running"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code} and no result"


def _process_state(pid: int) -> str:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("State:"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _obstacles(pid: int) -> str:
    """Why a process does not answer SIGUSR1, as far as the kernel tells."""
    bit = 1 << (signal.SIGUSR1 - 1)
    masks = dict(re.findall(r"^(\w+):\t([0-9a-f]{16})$", _read(f"/proc/{pid}/status"), re.MULTILINE))
    words = [f", in {waiting}" if (waiting := _read(f"/proc/{pid}/wchan").strip("0\n")) else ""]
    words += [
        f", the signal is {what}"
        for mask, what in (("SigBlk", "blocked"), ("SigIgn", "ignored"), ("ShdPnd", "pending"))
        if int(masks.get(mask, "0"), 16) & bit
    ]
    if masks and not int(masks.get("SigCgt", "0"), 16) & bit:
        words.append(", nobody handles the signal")
    return "".join(words)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _store(wanted: bool, timeout: float) -> Iterator[int | None]:
    """Hosts the ranks' TCPStore here, so that it outlives any rank; yields its port."""
    if not wanted:
        yield None
        return
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    yield store.port

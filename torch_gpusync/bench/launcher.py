"""Ranks as processes of this host: started together, followed, and ended in any case."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

# Imported once, in the server that the ranks are forked from. Nothing here may start a thread or compute.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch_gpusync", "torch_gpusync.bench.cpu"]
_GRACE_S = 5.0  # for the other ranks to report once one has failed, and for all to exit when they are done


class RankFailure(RuntimeError):
    """A rank raised, died or fell silent. ``details``: its traceback, or nothing."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


@dataclass(frozen=True)
class Context:
    """What a rank is told."""

    rank: int
    world_size: int
    timeout_s: float  # of any wait, of gpusync's and of its peers'
    store_port: int
    pipe: Connection
    # Done once all ranks have reported, the last entry first: no hang or crash of it loses a result.
    clean_up: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def progress(self, text: str) -> None:
        """Show that the work goes on; the launcher ends ranks that say nothing for its ``silence_s``."""
        self.pipe.send(("progress", text))

    def init_process_group(self, backend: str = "gloo") -> None:
        """Make this process one of the ranks of torch.distributed, until the clean-up."""
        import torch.distributed as dist

        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # all ranks are here, whatever the host's name resolves to
        limit = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore("127.0.0.1", self.store_port, is_master=False, timeout=limit)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit
        )
        self.clean_up.callback(dist.destroy_process_group)


Worker = Callable[[Context, Any], Any]  # a function of a module; what it takes and returns travels by pickle


def launch(
    worker: Worker,
    world_size: int,
    argument: Any,
    *,
    timeout_s: float = 60.0,
    silence_s: float = 180.0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Run ``worker(context, argument)`` as ``world_size`` processes and return their results in rank order.

    Each rank has one intra-op thread. ``on_progress`` is given what the ranks report, and which of them did not end of
    themselves. No process outlives the call, and none outlives this process. Raises RankFailure.
    """
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(_PRELOAD)
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(world_size):
            mine, theirs = processes.Pipe(duplex=True)
            context = Context(rank, world_size, timeout_s, store.port, theirs)
            process: BaseProcess = processes.Process(
                target=_rank_main, args=(worker, context, argument), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append((process, mine))
        results = _collect(ranks, silence_s, on_progress)
        for _, pipe in ranks:
            pipe.send("leave")
        limit = time.monotonic() + _GRACE_S
        for rank, (process, _) in enumerate(ranks):
            process.join(max(0.0, limit - time.monotonic()))
            if process.exitcode != 0:
                on_progress(f"rank {rank}, its result reported, {_how_it_ended(process)}")
        return results
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()


def _collect(
    ranks: list[tuple[BaseProcess, Connection]], silence_s: float, on_progress: Callable[[str], None]
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    heard = time.monotonic()
    while len(results) + len(failures) < len(ranks):
        limit = _GRACE_S if failures else silence_s
        open_pipes = {pipe: r for r, (_, pipe) in enumerate(ranks) if r not in results and r not in failures}
        ready = wait(list(open_pipes), timeout=max(0.0, heard + limit - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            r = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                kind, value = "died", None
            if kind == "progress":
                on_progress(value)
            elif kind == "result":
                results[r] = value
            elif kind == "error":
                failures[r] = RankFailure(f"rank {r} raised {value[0]}", value[1])
            else:
                ranks[r][0].join(_GRACE_S)
                failures[r] = RankFailure(f"rank {r}, without a result, {_how_it_ended(ranks[r][0])}")
            heard = time.monotonic()
    if failures:
        # A rank that died or raised something of its own comes before those that missed it.
        raise min(failures.items(), key=lambda item: ("SyncTimeoutError" in str(item[1]), item[0]))[1]
    if len(results) < len(ranks):
        silent = ", ".join(str(r) for r in range(len(ranks)) if r not in results)
        raise RankFailure(f"rank {silent} reported nothing for {silence_s:g} s and was ended")
    return [results[r] for r in range(len(ranks))]


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None:
        return "did not exit and was ended"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _rank_main(worker: Worker, context: Context, argument: Any) -> None:
    leave = threading.Event()

    def follow_launcher() -> None:
        try:
            context.pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # the launcher is gone
        leave.set()

    threading.Thread(target=follow_launcher, daemon=True).start()
    # A rank that aborts shall be gone at once, without a dump of all the memory that it has mapped.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which ends the ranks
    try:
        import torch

        torch.set_num_threads(1)
        _tell(context, "result", worker(context, argument))
    except BaseException as error:
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        # Before the traceback's frames are let go: what they hold may end the process when a GPU has failed.
        _tell(context, "error", (last, traceback.format_exc()))
    leave.wait()  # until all have reported: peers may still need this rank's memory and sockets
    context.clean_up.close()


def _tell(context: Context, kind: str, value: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        context.pipe.send((kind, value))

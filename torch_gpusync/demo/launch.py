"""Starting the ranks, following them, and making sure that they end: well, with an error, or by force."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext, ProcessException, ProcessExitedException

from .config import Config, DemoError
from .train import OnStep, Result

Worker = Callable[[int, Config, int, str], None]  # rank, config, store port, folder

_POLL_S = 0.1
_GRACE_S = 2.0  # for the other ranks to end by themselves once one has failed


class RankFailure(DemoError):
    """A rank crashed, was ended or stopped making progress. ``details``: its traceback, or nothing."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


def run_ranks(worker: Worker, config: Config, folder: Path, on_step: OnStep) -> list[Result]:
    """Run ``worker`` as one process per rank and return what each has left in ``folder``, in rank order.

    ``on_step`` is called in this process whenever the slowest rank has finished another step. Raises
    RankFailure; in any case no process is left.
    """
    timeout = timedelta(seconds=config.timeout_s)
    # Any free port, held from now on: nobody can take it between its choice and its use.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    for rank in range(config.ranks):
        store.set(f"progress/{rank}", "0 nan")
    context = mp.spawn(worker, args=(config, store.port, str(folder)), nprocs=config.ranks, join=False)
    try:
        _follow(context, store, config, on_step)
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [_load(folder, rank) for rank in range(config.ranks)]


def _follow(context: ProcessContext, store: dist.TCPStore, config: Config, on_step: OnStep) -> None:
    seen: list[int] = []
    moved = time.monotonic()
    while True:
        try:
            ended = context.join(timeout=_POLL_S, grace_period=_GRACE_S)
        except ProcessException as error:
            raise _explain(error) from None
        reports = [store.get(f"progress/{rank}").decode().split() for rank in range(config.ranks)]
        steps = [int(step) for step, _ in reports]
        if steps != seen:
            slowest = min(range(config.ranks), key=steps.__getitem__)
            if steps[slowest] > (min(seen) if seen else 0):
                on_step(steps[slowest], float(reports[slowest][1]))
            seen, moved = steps, time.monotonic()
        if ended:
            return
        limit = config.step_timeout_s if min(steps) > 0 else config.timeout_s
        if time.monotonic() - moved > limit:
            where = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
            raise RankFailure(f"no rank made progress for {limit:g} s (finished steps: {where})")


def _explain(error: ProcessException) -> RankFailure:
    rank = error.error_index
    if isinstance(error, ProcessExitedException):
        if error.signal_name:
            return RankFailure(f"rank {rank} was ended by {error.signal_name}")
        return RankFailure(f"rank {rank} ended with exit code {error.exit_code}")
    last = error.msg.strip().splitlines()[-1]
    return RankFailure(f"rank {rank} raised {last}", error.msg.strip())


def _load(folder: Path, rank: int) -> Result:
    path = folder / f"rank{rank}.pt"
    if not path.exists():  # an interrupted rank ends with exit code 0
        raise RankFailure(f"rank {rank} ended without a result")
    result: Result = torch.load(path)
    return result

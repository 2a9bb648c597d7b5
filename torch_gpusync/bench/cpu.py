"""A rank of the benchmark on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torch_gpusync import SymmetricBuffer, SyncGroup
from torch_gpusync.ops import ops

from .data import AllReduceData, check_barrier
from .exchange import exchange_subjects
from .gloo import gloo_subjects
from .launcher import Context
from .plan import EXCHANGES, Case, Plan
from .results import NOTHING
from .timing import Series, Subject, host_timer, measure

_MEETING_CHANNEL = 1  # of the barriers that samples start from
_COMPILED_CALLS = 20  # in one compiled function, so that its own start counts little


def run_rank(context: Context, plan: Plan) -> list[tuple[Case, list[Series]]]:
    """Measure every case of ``plan``; all ranks return the same subjects in the same order."""
    context.init_process_group()
    sync = SyncGroup(channels=2, timeout=context.timeout_s)
    context.clean_up.callback(sync.close)
    board = sync.buffer("board", (1,), torch.int64)
    return [(case, _run_case(context, plan, case, sync, board)) for case in plan.cases]


def _run_case(
    context: Context, plan: Plan, case: Case, sync: SyncGroup, board: SymmetricBuffer
) -> list[Series]:
    def progress(text: str) -> None:
        if context.rank == 0:
            context.progress(f"{case}: {text}")

    progress("warming up")
    if case.op in EXCHANGES:
        subjects = exchange_subjects(case, sync)
    else:
        subjects = gloo_subjects(case, sync, board) + _gpusync_subjects(case, plan.modes, sync, board)
    return measure(
        subjects,
        plan.sampling,
        timer=host_timer,
        meet=partial(ops.barrier.default, sync.token, sync.name, _MEETING_CHANNEL),
        agree=_greatest,
        progress=progress,
    )


def _greatest(value: float) -> float:
    everybodys = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(everybodys, dist.ReduceOp.MAX)
    return everybodys.item()


def _gpusync_subjects(
    case: Case, modes: tuple[str, ...], sync: SyncGroup, board: SymmetricBuffer
) -> list[Subject]:
    if case.op == "barrier":
        return _barrier_subjects(modes, sync, board)
    return _all_reduce_subjects(case, modes, sync)


def _barrier_subjects(modes: tuple[str, ...], sync: SyncGroup, board: SymmetricBuffer) -> list[Subject]:
    op, token, name = ops.barrier.default, sync.token, sync.name

    def repeated() -> None:
        for _ in range(_COMPILED_CALLS):
            op(token, name)

    subjects: list[Subject] = []
    if "eager" in modes:
        through_ops = partial(op, token, name)
        subjects += [
            Subject(NOTHING, "gpusync", partial(ops._nothing.default, token)),
            Subject("barrier", "gpusync", through_ops, check=partial(check_barrier, board, through_ops)),
            Subject("barrier", "SyncGroup", sync.barrier, check=partial(check_barrier, board, sync.barrier)),
        ]
    if "compile" in modes:
        compiled = torch.compile(repeated, fullgraph=True)
        subjects.append(
            Subject(
                *("barrier", "gpusync", compiled, "compile"),
                ops_per_call=_COMPILED_CALLS,
                check=partial(check_barrier, board, compiled),
            )
        )
    return subjects


def _all_reduce_subjects(case: Case, modes: tuple[str, ...], sync: SyncGroup) -> list[Subject]:
    op, token, name = ops.all_reduce.default, sync.token, sync.name
    data = AllReduceData(sync.rank, sync.world_size, case.nbytes)

    def repeated(x: torch.Tensor) -> Any:
        for _ in range(_COMPILED_CALLS):
            y = op(token, name, x)
        return y

    def subject(impl: str, call: Callable[[], Any], mode: str = "eager", ops_per_call: int = 1) -> Subject:
        return Subject(
            *("all_reduce", impl, call, mode),
            ops_per_call=ops_per_call,
            refresh=data.refresh,
            check=lambda: data.check_bits(call),
        )

    subjects: list[Subject] = []
    if "eager" in modes:
        subjects += [
            subject("gpusync", partial(op, token, name, data.input)),
            subject("SyncGroup", partial(sync.all_reduce, data.input)),
        ]
    if "compile" in modes:
        compiled = torch.compile(repeated, fullgraph=True)
        subjects.append(subject("gpusync", partial(compiled, data.input), "compile", _COMPILED_CALLS))
    return subjects

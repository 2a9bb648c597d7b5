"""The peer that every torch has: Gloo, through torch.distributed."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from torch_gpusync import SymmetricBuffer, SyncGroup

from .data import AllReduceData, check_barrier
from .plan import Case
from .timing import Subject


def gloo_subjects(case: Case, sync: SyncGroup, board: SymmetricBuffer) -> list[Subject]:
    """The default process group's own call for ``case``."""
    if case.op == "barrier":
        return [
            Subject(
                "barrier",
                "gloo",
                dist.barrier,
                is_peer=True,
                check=partial(check_barrier, board, dist.barrier),
            )
        ]
    data = AllReduceData(sync.rank, sync.world_size, case.nbytes)
    # In place: the numbers grow from call to call and may end as infinities, which add no slower than others.
    call = partial(dist.all_reduce, data.input)
    return [
        Subject(
            *("all_reduce", "gloo", call),
            is_peer=True,
            refresh=data.refresh,
            check=partial(data.check_in_place, call),
        )
    ]

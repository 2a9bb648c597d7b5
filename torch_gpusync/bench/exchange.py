"""The collectives in which ranks read one another's input: their data, and Gloo's beside the group's on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from torch_gpusync import SyncGroup

from .plan import EXCHANGES, Case
from .timing import Subject

SRC = 0  # whose input a broadcast hands on
_HIGHEST = 1000


class ExchangeData:
    """A rank's input on the group's device and what becomes of all of them: whole numbers, so small that their sums over
    ranks are exact in ``dtype`` and no order of adding them matters."""

    def __init__(self, op: str, sync: SyncGroup, nbytes: int, dtype: torch.dtype = torch.float32) -> None:
        n = sync.world_size
        self._op, self._rank, self._n = op, sync.rank, n
        # All whole numbers up to 2 / eps are exact: 256 in bfloat16.
        self._high = min(_HIGHEST, int(2 / torch.finfo(dtype).eps) // n + 1)
        rows = max(nbytes // dtype.itemsize // n, 1)
        self._shape = (rows * n,)
        self._draw = 0
        self.input = torch.empty(self._shape, dtype=dtype, device=sync.device)
        self.output = self.input.new_empty({"all_gather": n * n, "reduce_scatter": 1}.get(op, n) * rows)
        self.refresh()

    def refresh(self) -> None:
        """Other numbers than before, in the same memory."""
        self._draw += 1
        self.input.copy_(self._drawn(self._rank))

    def check(self, call: Callable[[], torch.Tensor]) -> None:
        """Raise AssertionError unless ``call`` makes of fresh inputs what it should."""
        self.refresh()
        torch.testing.assert_close(call().float().cpu(), self._expected(), rtol=0, atol=0)

    def _drawn(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._draw * self._n + rank)
        return torch.randint(0, self._high, self._shape, generator=generator).float()

    def _expected(self) -> torch.Tensor:
        if self._op == "broadcast":
            return self._drawn(SRC)
        inputs = [self._drawn(rank) for rank in range(self._n)]
        if self._op == "all_gather":
            return torch.cat(inputs)
        mine = [x.chunk(self._n)[self._rank] for x in inputs]
        return torch.cat(mine) if self._op == "all_to_all" else torch.stack(mine).sum(0)


def exchange_subjects(case: Case, sync: SyncGroup) -> list[Subject]:
    """Gloo's call and the group's method. ``case.nbytes`` is what each rank gives, rounded down to whole parts."""
    assert case.op in EXCHANGES
    data = ExchangeData(case.op, sync, case.nbytes)
    x, y = data.input, data.output

    def gloo() -> torch.Tensor:
        if case.op == "all_gather":
            dist.all_gather_into_tensor(y, x)
        elif case.op == "reduce_scatter":
            dist.reduce_scatter_tensor(y, x)
        elif case.op == "all_to_all":
            dist.all_to_all_single(y, x)
        else:
            dist.broadcast(x, SRC)
            return x
        return y

    method = getattr(sync, case.op)
    ours = partial(method, x, SRC) if case.op == "broadcast" else partial(method, x)
    return [
        Subject(case.op, "gloo", gloo, is_peer=True, refresh=data.refresh, check=partial(data.check, gloo)),
        Subject(case.op, "SyncGroup", ours, refresh=data.refresh, check=partial(data.check, ours)),
    ]

"""The check that matters most: do all ranks see what eager mode would have shown them, whatever compiles the
program?
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from ordering_designs import DESIGNS, N, Shipped
from ordering_programs import PROGRAMS, Program
from torch import Tensor

from torch_gpusync.testing import executed_ops

STEPS = 5

Run = Callable[[Tensor], list[Tensor]]


def check_programs(
    rank: int, design_name: str, backend: str, dynamic: bool, names: tuple[str, ...], timeout: float
) -> dict[str, list[str]]:
    """Runs programs of a design eagerly, compiled on all ranks, and compiled on one rank only; returns what
    was wrong.

    One entry per program: findings as text, none if all was right. Every step has new data, different on each
    rank; with `dynamic` also another number of rows. Another rank is late at each step.
    """
    design = DESIGNS[design_name](rank, timeout)
    with torch.no_grad():
        return {name: _Check(design, PROGRAMS[name], backend, dynamic).findings() for name in names}


class _Check:
    """One program of one design under one compiler, on this rank."""

    def __init__(self, design: Shipped, program: Program, backend: str, dynamic: bool) -> None:
        self.rank = design.rank
        self.program = program
        self.dynamic = dynamic
        self.number = 0
        w = 2 * torch.eye(N)
        self.eager = lambda x: program.run(design, x, w)
        self.compiled = torch.compile(self.eager, backend=backend, fullgraph=True, dynamic=dynamic)

    def findings(self) -> list[str]:
        eager_log, found = self.logged(self.eager, "eager")
        if everywhere(found):
            return ["not even eager mode is right", *found]
        for _ in range(STEPS):
            found += self.step(self.compiled, "compiled")
        log, more = self.logged(self.compiled, "compiled")
        found += more
        if log != eager_log:
            found.append(f"compiled code ran {' '.join(log) or 'nothing'} instead of {' '.join(eager_log)}")
        if everywhere(found):  # then ranks in different modes may wait for one another in vain
            return found
        for lone in range(dist.get_world_size()):
            for _ in range(2):
                function = self.compiled if self.rank == lone else self.eager
                found += self.step(function, f"only rank {lone} compiled")
        return found

    def logged(self, function: Run, mode: str) -> tuple[list[str], list[str]]:
        with executed_ops() as log:
            found = self.step(function, mode, rows=N)
        return [str(op) for op in log], found

    def step(self, function: Run, mode: str, rows: int | None = None) -> list[str]:
        """One call with new data; `rows` fixes the shape, which otherwise changes too where shapes are
        dynamic.
        """
        self.number += 1
        where = f"{mode}, step {self.number}"
        rows = rows or (2 + self.number % (N - 2) if self.dynamic else N)
        if self.number % 3 == self.rank:
            time.sleep(0.003)  # skew
        try:
            seen = function(torch.full((rows, N), _value(self.number, self.rank)))
        except RuntimeError as error:  # a group that timed out: the ranks' orders do not fit together
            return [f"{where}: {error}"]
        wanted = self.program.expect(self.rank, lambda r: _value(self.number, r))
        return [
            f"{where}: read {index} shows {x.unique().tolist()[:4]}, not {value}"
            for index, (x, value) in enumerate(zip(seen, wanted, strict=True))
            if not torch.equal(x, torch.full((rows, N), value))
        ]


def _value(step: int, rank: int) -> float:
    return 1000.0 + 100 * step + 10 * rank


def everywhere(found: list[str]) -> bool:
    """Has any rank a finding? Collective, so that all ranks go on or stop together."""
    count = torch.tensor([len(found)])
    dist.all_reduce(count)
    return bool(count.item())

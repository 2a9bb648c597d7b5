"""What the ranks of test_compile.py run. Each function returns findings as text, none if all was right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compile_cases import CASES, Case, PlainAllReduce
from ordering_check import everywhere
from ordering_designs import N, Shipped
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_gpusync.testing import executed_ops

STEPS = 3

Forward = Callable[..., Tensor]


def check_training(rank: int, backend: str, dynamic: bool) -> dict[str, list[str]]:
    """Forward and backward of every case: eager, compiled on all ranks, compiled on one rank only.

    Output and gradients are compared with a computation in this process alone, the executed ops with eager
    mode's. New data at every step; with `dynamic` a new number of rows too, which must not compile anew.
    """
    design = Shipped(rank, 90)
    return {name: _Training(design, case, backend, dynamic).findings() for name, case in CASES.items()}


def check_plain_all_reduce(rank: int) -> list[str]:
    """A wrong model, which the check above has to see."""
    return _Training(Shipped(rank, 30), PlainAllReduce(), "aot_eager", False).findings()


class _Training:
    def __init__(self, design: Shipped, case: Case, backend: str, dynamic: bool) -> None:
        self.rank, self.case, self.dynamic = design.rank, case, dynamic
        self.number = 0
        self.counter = CompileCounterWithBackend(backend)
        self.eager = lambda *inputs: case.forward(design, *inputs)
        self.compiled = torch.compile(self.eager, backend=self.counter, fullgraph=True, dynamic=dynamic)

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
        if everywhere(found):
            return found
        for lone in range(dist.get_world_size()):
            function = self.compiled if self.rank == lone else self.eager
            found += self.step(function, f"only rank {lone} compiled")
        if self.counter.frame_count != 1:
            found.append(f"compiled {self.counter.frame_count} times instead of once")
        return found

    def logged(self, function: Forward, mode: str) -> tuple[list[str], list[str]]:
        with executed_ops() as log:
            found = self.step(function, mode, rows=N)
        return [str(op) for op in log], found

    def step(self, function: Forward, mode: str, rows: int | None = None) -> list[str]:
        self.number += 1
        rows = rows or (2 + self.number % (N - 2) if self.dynamic else N)
        inputs = [x.requires_grad_() for x in self.case.inputs(self.rank, self.number, rows)]
        output = function(*inputs)
        (output * self.case.weight(self.rank, self.number)).sum().backward()
        found = []
        wanted = self.case.reference(self.rank, self.number, rows)
        results = [output.detach(), *(x.grad for x in inputs)]
        for index, (x, y) in enumerate(zip(results, wanted, strict=True)):
            name = "output" if index == 0 else f"gradient of input {index - 1}"
            if x is None or not torch.allclose(x, y, rtol=1e-4, atol=1e-5):
                off = "missing" if x is None else f"off by {(x - y).abs().max().item():.3g}"
                found.append(f"{mode}, step {self.number}: {name} is {off}")
        return found


def check_offsets(rank: int, backend: str) -> list[str]:
    """Ten calls with ten offsets, data checked: two compilations at most, since the second makes the offset
    dynamic.
    """
    design = Shipped(rank, 90)
    sync, buffer = design.sync["world"], design.buffer["world"]
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def exchange(x: Tensor, offset: int) -> Tensor:
        buffer.put(x + 1, offset=offset)
        sync.barrier()
        peer = buffer.get((rank + 1) % 3, size=(4,), offset=offset)
        sync.barrier()
        return peer * 2

    found = []
    for call in range(10):
        offset = 7 + 11 * call
        seen = exchange(torch.full((4,), 100.0 * call + rank), offset)
        wanted = 2 * (100.0 * call + (rank + 1) % 3 + 1)
        if not torch.equal(seen, torch.full((4,), wanted)):
            found.append(f"offset {offset}: read {seen.tolist()}, not {wanted}")
        mine: Any = buffer.get(size=(4,), offset=offset)
        if mine.tolist() != [100.0 * call + rank + 1] * 4:
            found.append(f"offset {offset}: my own buffer holds {mine.tolist()} there")
    if counter.frame_count > 2:
        found.append(f"compiled {counter.frame_count} times for 10 offsets")
    return found

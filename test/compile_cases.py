"""Differentiable programs for test_compile.py, each with a reference that needs no other rank.

A rank's inputs depend on rank and step only, so any rank can compute all ranks' inputs and, with ordinary
autograd in one process, what its own output and gradients have to be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from ordering_designs import MEMBERS, N, Shipped
from torch import Tensor

from torch_gpusync.nn.functional import copy_to_ranks, reduce_from_ranks

WORLD = MEMBERS["world"]
PAIRS = {key: members for key, members in MEMBERS.items() if key != "world"}


def random(rank: int, step: int, index: int, *shape: int) -> Tensor:
    seed = (step * 10 + rank) * 10 + index
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


class Case(ABC):
    """`forward(design, *inputs)` on every rank; the loss is the sum of its output times `weight`."""

    def inputs(self, rank: int, step: int, rows: int) -> list[Tensor]:
        return [random(rank, step, 0, rows, N), random(rank, step, 1, N, N)]

    def weight(self, rank: int, step: int) -> float:
        # Differs by rank, so that no rank's gradient can stand in for another's.
        return 1.0 + 0.25 * rank + 0.125 * step

    @abstractmethod
    def forward(self, design: Shipped, *inputs: Tensor) -> Tensor: ...

    @abstractmethod
    def reference(self, rank: int, step: int, rows: int) -> list[Tensor]:
        """Output and gradients of this rank."""


class TensorParallel(Case):
    """A two-layer perceptron, split by columns and then by rows, as in Megatron-LM."""

    def inputs(self, rank: int, step: int, rows: int) -> list[Tensor]:
        x = random(0, step, 0, rows, N)  # the same on all ranks, as is the gradient of the output
        return [x, random(rank, step, 1, N, N), random(rank, step, 2, N, N)]

    def weight(self, rank: int, step: int) -> float:
        return 1.0 + step

    def forward(self, design: Shipped, *inputs: Tensor) -> Tensor:
        x, column, row = inputs
        hidden = torch.relu(copy_to_ranks(x, design.sync["world"]) @ column)
        return reduce_from_ranks(hidden @ row, design.sync["world"])

    def reference(self, rank: int, step: int, rows: int) -> list[Tensor]:
        of_ranks = [self.inputs(r, step, rows) for r in WORLD]
        x = of_ranks[0][0].requires_grad_()
        column = torch.cat([c for _, c, _ in of_ranks], dim=1).requires_grad_()
        row = torch.cat([r for _, _, r in of_ranks], dim=0).requires_grad_()
        output = torch.relu(x @ column) @ row
        (output * self.weight(rank, step)).sum().backward()
        mine = slice(rank * N, rank * N + N)
        assert x.grad is not None and column.grad is not None and row.grad is not None
        return [output.detach(), x.grad, column.grad[:, mine], row.grad[mine]]


class PlainAllReduce(TensorParallel):
    """What is wrong in tensor parallelism: the backward pass adds up the ranks' copies of one gradient."""

    def forward(self, design: Shipped, *inputs: Tensor) -> Tensor:
        x, column, row = inputs
        hidden = torch.relu(copy_to_ranks(x, design.sync["world"]) @ column)
        return design.sync["world"].all_reduce(hidden @ row)


class _Summed(Case):
    """Base of the cases whose gradients are those of the sum of all ranks' losses."""

    @abstractmethod
    def together(self, of_ranks: list[list[Tensor]]) -> list[Tensor]:
        """All ranks' outputs from all ranks' inputs."""

    def reference(self, rank: int, step: int, rows: int) -> list[Tensor]:
        of_ranks = [[x.requires_grad_() for x in self.inputs(r, step, rows)] for r in WORLD]
        outputs = self.together(of_ranks)
        losses = [(output * self.weight(r, step)).sum() for r, output in zip(WORLD, outputs, strict=True)]
        torch.stack(losses).sum().backward()
        return [outputs[rank].detach(), *(x.grad for x in of_ranks[rank] if x.grad is not None)]


class OverlappingGroups(_Summed):
    """Reductions over three groups with matrix products between, and a peer's activation read between two
    barriers.
    """

    def forward(self, design: Shipped, *inputs: Tensor) -> Tensor:
        x, w = inputs
        y = x @ w
        for pair in design.pairs:
            y = design.sync[pair].all_reduce(torch.sin(y)) @ w
        design.put("world", y.detach())
        design.barrier("world")
        peer = design.get("world", (design.rank + 1) % len(WORLD), x.shape[0])
        design.barrier("world")
        y = design.sync["world"].all_reduce(y * peer) @ w
        for pair in design.pairs:
            y = design.sync[pair].all_reduce(y)
        return y

    def together(self, of_ranks: list[list[Tensor]]) -> list[Tensor]:
        w = [w for _, w in of_ranks]
        y = [x @ w for x, w in of_ranks]
        # Rank 1 does both of its pairs one after the other; the second sees the first's result.
        for members in PAIRS.values():
            total = sum((torch.sin(y[r]) for r in members), torch.zeros(()))
            y = [total @ w[r] if r in members else y[r] for r in WORLD]
        peers = [y[(r + 1) % len(WORLD)].detach() for r in WORLD]
        total = sum((y[r] * peers[r] for r in WORLD), torch.zeros(()))
        y = [total @ w[r] for r in WORLD]
        for members in PAIRS.values():
            total = sum((y[r] for r in members), torch.zeros(()))
            y = [total if r in members else y[r] for r in WORLD]
        return y


class SequenceParallel(_Summed):
    """Gather, multiply, scatter, and the collectives with a root, each of which depends on the one before."""

    def forward(self, design: Shipped, *inputs: Tensor) -> Tensor:
        x, w = inputs
        sync = design.sync["world"]
        part = sync.reduce_scatter(torch.sin(sync.all_gather(x) @ w), "avg")
        part = sync.broadcast(part, 1) * part + sync.reduce(torch.cos(part), 2)
        return sync.all_to_all(torch.cat([part, 2 * part, 3 * part]))

    def together(self, of_ranks: list[list[Tensor]]) -> list[Tensor]:
        everything = torch.cat([x for x, _ in of_ranks])
        mean = sum((torch.sin(everything @ w) for _, w in of_ranks), torch.zeros(())) / len(WORLD)
        parts = list(mean.chunk(len(WORLD)))
        reduced = sum((torch.cos(part) for part in parts), torch.zeros(()))
        parts = [parts[1] * part + (reduced if r == 2 else 0) for r, part in enumerate(parts)]
        return [torch.cat([(r + 1) * part for part in parts]) for r in WORLD]


class _NeighbourGradient(torch.autograd.Function):
    """Identity; in the backward pass each rank continues with the gradient of the next rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, design: Shipped) -> Tensor:
        ctx.design = design
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        design, gradient = ctx.design, gradients[0]
        design.put("world", gradient)
        design.barrier("world")
        neighbour = design.get("world", (design.rank + 1) % len(WORLD), gradient.shape[0])
        design.barrier("world")
        return neighbour, None


class BackwardOnly(Case):
    """No gpusync op in the forward pass."""

    def forward(self, design: Shipped, *inputs: Tensor) -> Tensor:
        x, w = inputs
        y: Tensor = _NeighbourGradient.apply(torch.sin(x) @ w, design)
        return torch.cos(y)

    def reference(self, rank: int, step: int, rows: int) -> list[Tensor]:
        x, w = self.inputs(rank, step, rows)
        neighbour = (rank + 1) % len(WORLD)
        their_x, their_w = self.inputs(neighbour, step, rows)
        gradient = -torch.sin(torch.sin(their_x) @ their_w) * self.weight(neighbour, step)
        return [torch.cos(torch.sin(x) @ w), (gradient @ w.T) * torch.cos(x), torch.sin(x).T @ gradient]


class BetweenPointwise(Case):
    """A barrier between pointwise ops that would be one kernel without it."""

    def forward(self, design: Shipped, *inputs: Tensor) -> Tensor:
        x, w = inputs
        y = torch.sin(x * 2) + 1
        design.barrier("world")
        return torch.cos(y) * w[:1]

    def reference(self, rank: int, step: int, rows: int) -> list[Tensor]:
        x, w = (x.requires_grad_() for x in self.inputs(rank, step, rows))
        output = torch.cos(torch.sin(x * 2) + 1) * w[:1]
        (output * self.weight(rank, step)).sum().backward()
        assert x.grad is not None and w.grad is not None
        return [output.detach(), x.grad, w.grad]


CASES: dict[str, Case] = {
    "tensor_parallel": TensorParallel(),
    "overlapping_groups": OverlappingGroups(),
    "sequence_parallel": SequenceParallel(),
    "case_33_backward_only": BackwardOnly(),
    "case_30_between_pointwise": BetweenPointwise(),
}

"""Programs whose results tell whether put, barrier and get ran in program order.

Each is `program(design, x, w) -> list of what was read`, with its twin `expected` that computes the same from
the ranks' inputs. `x` is `rows` x N and constant, `w` is twice the identity; all values are whole numbers
that float32 holds exactly. Every program ends with a barrier, so that one call cannot disturb the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from ordering_designs import MEMBERS, Shipped
from torch import Tensor

ROUNDS = 4
PAIR_ROUNDS = 3  # of two_groups, which does twice as much in each


@dataclass(frozen=True)
class Program:
    """`run(design, x, w)`, and `expect(rank, value)`: what rank must see when `value(r)` is what rank r's x
    is filled with.
    """

    run: Callable[[Shipped, Tensor, Tensor], list[Tensor]]
    expect: Callable[[int, Callable[[int], float]], list[float]]


def _rounds(design: Shipped, x: Tensor, w: Tensor) -> list[Tensor]:
    """One group: publish, barrier, read all, barrier. Pointwise kernels around it, and the same reads in
    every round.
    """
    seen = []
    for _ in range(ROUNDS):
        x = (x + 1).relu()  # the same kernel in each round, to keep compilation short
        design.put("world", x)
        design.barrier("world")
        seen += [design.get("world", peer, x.shape[0]) * 2 for peer in MEMBERS["world"]]
        design.barrier("world")
    return seen


def _rounds_expect(rank: int, value: Callable[[int], float]) -> list[float]:
    return [2 * (value(peer) + k + 1) for k in range(ROUNDS) for peer in MEMBERS["world"]]


def _two_groups(design: Shipped, x: Tensor, w: Tensor) -> list[Tensor]:
    """Overlapping groups: one's barrier orders another's buffers, in both directions, with matrix products
    between.

    Everything read is added up: Inductor orders a graph anew to save memory where the order of values leaves
    it a choice, and with one sum it has one (returning all the reads would hide the wrong designs).
    """
    total = torch.zeros_like(x)
    for _ in range(PAIR_ROUNDS):
        x = x + 1
        for pair in design.pairs:
            design.put(pair, x @ w)
        design.barrier("world")
        for pair in design.pairs:
            total = total + design.get(pair, design.partner(pair), x.shape[0]) @ w
        design.barrier("world")
        x = x + 1
        design.put("world", x @ w)
        for pair in design.pairs:
            design.barrier(pair)
        for pair in design.pairs:
            total = total + design.get("world", design.partner(pair), x.shape[0]) @ w
        for pair in design.pairs:
            design.barrier(pair)
    return [total]


def _two_groups_expect(rank: int, value: Callable[[int], float]) -> list[float]:
    partners = [a + b - rank for a, b in (MEMBERS["left"], MEMBERS["right"]) if rank in (a, b)]
    return [float(sum(4 * (value(partner) + k + 1) for k in range(2 * PAIR_ROUNDS) for partner in partners))]


PROGRAMS = {
    "rounds": Program(_rounds, _rounds_expect),
    "two_groups": Program(_two_groups, _two_groups_expect),
}

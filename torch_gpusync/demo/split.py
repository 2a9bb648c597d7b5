"""How the full model's weights are divided over ranks, and put together again.

Column-parallel matrices (``qkv``, ``up``) and the two vocabulary tables keep a share of their rows,
row-parallel ones (``out``, ``down``) a share of their columns; everything else is the same on all ranks.
``qkv`` holds three matrices below each other, and a rank's heads are a share of each of the three.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Rule:
    dim: int  # the dimension that is divided
    parts: int = 1  # matrices that lie one after the other along it


_RULES = {
    "embedding.weight": _Rule(0),
    "head.weight": _Rule(0),
    "qkv.weight": _Rule(0, parts=3),
    "out.weight": _Rule(1),
    "up.weight": _Rule(0),
    "up.bias": _Rule(0),
    "down.weight": _Rule(1),
}


def _rule(name: str) -> _Rule | None:
    return _RULES.get(".".join(name.split(".")[-2:]))


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The range [start, stop) of ``size`` items that is ``rank``'s; the first ranks take one more each of a
    rest."""
    least, rest = divmod(size, ranks)
    start = rank * least + min(rank, rest)
    return start, start + least + (rank < rest)


def shard(full: State, rank: int, ranks: int) -> State:
    """The weights of ``rank``, copied from the full model's."""
    result: State = {}
    for name, tensor in full.items():
        rule = _rule(name)
        if rule is None:
            result[name] = tensor.clone()
            continue
        start, stop = share(tensor.shape[rule.dim] // rule.parts, rank, ranks)
        pieces = [part.narrow(rule.dim, start, stop - start) for part in tensor.chunk(rule.parts, rule.dim)]
        result[name] = torch.cat(pieces, rule.dim)
    return result


def gather(shards: list[State]) -> State:
    """The full model's weights from all ranks', in rank order; of what is not divided, rank 0's."""
    result: State = {}
    for name, first in shards[0].items():
        rule = _rule(name)
        if rule is None:
            result[name] = first
            continue
        parts = [state[name].chunk(rule.parts, rule.dim) for state in shards]
        result[name] = torch.cat([rank[i] for i in range(rule.parts) for rank in parts], rule.dim)
    return result


def replica_error(shards: list[State]) -> float:
    """The greatest absolute difference between the ranks' copies of the weights that are not divided."""
    first = shards[0]
    names = [name for name in first if _rule(name) is None]
    return float(
        torch.stack([(state[name] - first[name]).abs().max() for state in shards for name in names]).max()
    )

"""Ways to bring put, barrier and get into a graph: the shipped one, and four that are silently wrong.

All of them move the same bytes in eager mode. The wrong ones are libraries of these tests only: their kernels
call the shipped ops, under schemas (or with tokens) that tell the compiler too little. Each has a library
name of its own, since compile caches key on the schema.

Three ranks hold three groups, `world` (0, 1, 2), `left` (0, 1) and `right` (1, 2), each with a buffer and, so
that a log of executed ops tells them apart, a channel. Ranks are global ranks here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_gpusync

MEMBERS = {"world": (0, 1, 2), "left": (0, 1), "right": (1, 2)}
CHANNEL = {"world": 0, "left": 1, "right": 2}
N = 16  # a buffer holds N x N float32


class Shipped:
    """The shipped design, through the public methods."""

    name = "shipped"

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank = rank
        self.sync: dict[str, torch_gpusync.SyncGroup] = {}
        self.buffer: dict[str, torch_gpusync.SymmetricBuffer] = {}
        for key, members in MEMBERS.items():
            process_group = dist.new_group(list(members))
            if rank in members:
                self.sync[key] = torch_gpusync.SyncGroup(process_group, name=key, timeout=timeout)
                self.buffer[key] = self.sync[key].buffer("data", (N, N), torch.float32)
        self.pairs = [key for key in self.sync if key != "world"]

    def partner(self, key: str) -> int:
        """The other rank of a pair."""
        a, b = MEMBERS[key]
        return b if self.rank == a else a

    def put(self, key: str, x: Tensor) -> None:
        """Writes the first rows of my buffer."""
        self.buffer[key].put(x)

    def barrier(self, key: str) -> None:
        self.sync[key].barrier(CHANNEL[key])

    def get(self, key: str, peer: int, rows: int) -> Tensor:
        """Reads the first rows of a peer's buffer."""
        return self.buffer[key].get(MEMBERS[key].index(peer), size=(rows, N))


class _Library(Shipped):
    """Base of the designs with ops of their own."""

    schemas: tuple[str, ...]

    def __init__(self, rank: int, timeout: float) -> None:
        super().__init__(rank, timeout)
        self.library = torch.library.Library(f"gpusync_wrong_{self.name}", "DEF")
        for schema in self.schemas:
            self.library.define(schema)
        self.ops = getattr(torch.ops, f"gpusync_wrong_{self.name}")

    def implement(self, op: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self.library.impl(op, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gpusync_wrong_{self.name}::{op}", fake, lib=self.library)


class Undeclared(_Library):
    """No op says that it has an effect: what returns nothing is dropped, equal reads are merged."""

    name = "undeclared"
    schemas = (
        "put(str key, Tensor x) -> ()",
        "barrier(str key) -> ()",
        "get(str key, int peer, SymInt rows) -> Tensor",
    )

    def __init__(self, rank: int, timeout: float) -> None:
        super().__init__(rank, timeout)
        self.implement("put", lambda key, x: Shipped.put(self, key, x), lambda key, x: None)
        self.implement("barrier", lambda key: Shipped.barrier(self, key), lambda key: None)
        self.implement(
            "get",
            lambda key, peer, rows: Shipped.get(self, key, peer, rows),
            lambda key, peer, rows: torch.empty(rows, N),
        )

    def put(self, key: str, x: Tensor) -> None:
        self.ops.put(key, x)

    def barrier(self, key: str) -> None:
        self.ops.barrier(key)

    def get(self, key: str, peer: int, rows: int) -> Tensor:
        return self.ops.get(key, peer, rows)  # type: ignore[no-any-return]


class EffectToken(Undeclared):
    """The same ops, all of them marked as ordered effects by a private API of torch."""

    name = "effect_token"

    def __init__(self, rank: int, timeout: float) -> None:
        super().__init__(rank, timeout)
        from torch._higher_order_ops.effects import _EffectType  # its old name, which stays an alias

        for op in ("put", "barrier", "get"):
            torch.library._register_effectful_op(getattr(self.ops, op).default, _EffectType.ORDERED)


class MutablePayload(_Library):
    """The barrier declares that it mutates the tensors it orders; `copy_` writes and `clone` reads them."""

    name = "mutable_payload"
    schemas = ("barrier(Tensor(a!)[] payload, str key) -> ()",)

    def __init__(self, rank: int, timeout: float) -> None:
        super().__init__(rank, timeout)
        self.implement("barrier", lambda payload, key: Shipped.barrier(self, key), lambda payload, key: None)
        folder: list[str | None] = [tempfile.mkdtemp(prefix="gpusync-payload-") if rank == 0 else None]
        dist.broadcast_object_list(folder)
        # All ranks' tensors, mapped by every rank: what a symmetric tensor is in eager mode.
        self.memory = {
            key: torch.from_file(
                f"{folder[0]}/{key}", shared=True, size=len(members) * N * N, dtype=torch.float32
            ).view(len(members), N, N)
            for key, members in MEMBERS.items()
        }
        self.rows: dict[str, list[Tensor]] = {key: list(memory) for key, memory in self.memory.items()}
        dist.barrier()
        if rank == 0:  # mapped by all: the names are no longer needed
            for key in MEMBERS:
                Path(f"{folder[0]}/{key}").unlink()
            Path(str(folder[0])).rmdir()

    def _mine(self, key: str) -> Tensor:
        return self.rows[key][MEMBERS[key].index(self.rank)]

    def put(self, key: str, x: Tensor) -> None:
        self._mine(key)[: x.shape[0]].copy_(x)

    def barrier(self, key: str) -> None:
        self.ops.barrier([self._mine(key)], key)

    def get(self, key: str, peer: int, rows: int) -> Tensor:
        return self.rows[key][MEMBERS[key].index(peer)][:rows].clone()


class TokenPerGroup(Shipped):
    """The shipped ops with a token for each group: nothing orders the ops of one group against another's."""

    name = "token_per_group"

    def __init__(self, rank: int, timeout: float) -> None:
        super().__init__(rank, timeout)
        self.tokens = {key: torch.zeros(1, dtype=torch.int32) for key in self.sync}

    def put(self, key: str, x: Tensor) -> None:
        torch.ops.gpusync.put(self.tokens[key], key, "data", x)

    def barrier(self, key: str) -> None:
        torch.ops.gpusync.barrier(self.tokens[key], key, CHANNEL[key])

    def get(self, key: str, peer: int, rows: int) -> Tensor:
        return torch.ops.gpusync.get(  # type: ignore[no-any-return]
            self.tokens[key], key, "data", MEMBERS[key].index(peer), (rows, N), 0, torch.float32
        )


DESIGNS: dict[str, type[Shipped]] = {
    design.name: design for design in (Shipped, Undeclared, EffectToken, MutablePayload, TokenPerGroup)
}

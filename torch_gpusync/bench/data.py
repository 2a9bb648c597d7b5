"""Payloads whose right result every rank can compute by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_gpusync import SymmetricBuffer

_CHECKED_BARRIERS = 100


class AllReduceData:
    """A rank's fp32 input, drawn anew by ``refresh``, and what the sum over ranks has to be."""

    def __init__(self, rank: int, world_size: int, nbytes: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._draw = 0
        self.input = torch.empty(nbytes // 4)
        self.refresh()

    def refresh(self) -> None:
        """Other numbers than before, in the same memory."""
        self._draw += 1
        self.input.copy_(self._drawn(self._rank))

    def check_bits(self, all_reduce: Callable[[], torch.Tensor]) -> None:
        """Raise AssertionError unless ``all_reduce`` sums fresh inputs in rank order, to the bit."""
        self.refresh()
        torch.testing.assert_close(all_reduce(), self._expected(), rtol=0, atol=0)

    def check_in_place(self, all_reduce: Callable[[], object]) -> None:
        """Raise AssertionError unless ``all_reduce`` turns fresh inputs into their sum, up to rounding."""
        self.refresh()
        all_reduce()
        torch.testing.assert_close(self.input, self._expected(), rtol=1e-5, atol=1e-5)

    def _drawn(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._draw * self._world_size + rank)
        return torch.rand(self.input.shape, generator=generator) - 0.5

    def _expected(self) -> torch.Tensor:
        total = self._drawn(0)
        for rank in range(1, self._world_size):
            total += self._drawn(rank)
        return total


def check_barrier(board: SymmetricBuffer, barrier: Callable[[], object]) -> None:
    """Does every rank see, after ``barrier``, what all ranks have written before it?"""
    start = int(board.get().item())
    for value in range(start + 1, start + 1 + _CHECKED_BARRIERS):
        board.put(torch.tensor([value]))
        barrier()
        seen = [int(board.get(rank).item()) for rank in range(board.sync.world_size)]
        barrier()  # nobody writes the next value before all have read this one
        assert seen == [value] * len(seen), (
            f"after a barrier the ranks' values were {seen} instead of {value}"
        )

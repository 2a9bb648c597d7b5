"""What a user would call instead on GPUs: torch SymmetricMemory and, with a GPU for each rank, NCCL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist


class Peers:
    """The peers' handles and buffers, for payloads up to ``nbytes``. All ranks make it."""

    def __init__(self, nbytes: int, device: torch.device, has_nccl: bool) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None
        self.group_name: str = group.group_name
        self.buffer = symmetric_memory.empty(max(nbytes, 4096) // 2, dtype=torch.bfloat16, device=device)
        self._handle = symmetric_memory.rendezvous(self.buffer, group)
        self._has_nccl = has_nccl
        self._one = torch.zeros(1, device=device)

    def barriers(self) -> list[tuple[str, Callable[[], object]]]:
        """(impl, call) of each barrier."""
        found: list[tuple[str, Callable[[], object]]] = [
            ("symm_mem", partial(self._handle.barrier, channel=0))
        ]
        if self._has_nccl:
            found.append(("nccl", partial(dist.all_reduce, self._one)))
        return found

    def all_reduces(self, x: torch.Tensor) -> list[tuple[str, Callable[[], object]]]:
        """(impl, call) of each all-reduce of ``x``.

        ``one_shot`` and ``two_shot`` take their input where it lies, in symmetric memory; ``one_shot_copy``
        brings an ordinary tensor there first, as gpusync does.
        """
        there = self.buffer[: x.numel()]
        there.copy_(x)
        variants = torch.ops.symm_mem
        found: list[tuple[str, Callable[[], object]]] = [
            ("symm_mem one_shot", partial(variants.one_shot_all_reduce, there, "sum", self.group_name)),
            (
                "symm_mem one_shot_copy",
                partial(variants.one_shot_all_reduce_copy, there, x, "sum", self.group_name),
            ),
            ("symm_mem two_shot", partial(variants.two_shot_all_reduce_, there, "sum", self.group_name)),
        ]
        if self._has_nccl:
            found.append(("nccl", partial(dist.all_reduce, torch.zeros_like(x))))
        return found

"""What a user would call instead on GPUs: torch SymmetricMemory and, with a GPU for each rank, NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

Calls = list[tuple[str, Callable[[], object]]]  # (impl, call)


def nccl_works(ranks_on_gpu: int) -> bool:
    """NCCL asks for a GPU for each rank; from 2.30 on ranks may share one where NCCL_MULTI_RANK_GPU_ENABLE=1 says so."""
    return ranks_on_gpu == 1 or (
        os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.nccl.version() >= (2, 30)
    )


class Peers:
    """The peers' handles and buffers, for payloads up to ``nbytes``. All ranks make it.

    Attributes:
        has_nccl: see ``nccl_works``.
        buffer: this rank's part of symmetric memory, bf16.
    """

    def __init__(self, nbytes: int, device: torch.device, ranks_on_gpu: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None
        self.group_name: str = group.group_name
        self.buffer = symmetric_memory.empty(max(nbytes, 4096) // 2, dtype=torch.bfloat16, device=device)
        self._handle = symmetric_memory.rendezvous(self.buffer, group)
        self.has_nccl = nccl_works(ranks_on_gpu)
        self._ranks_on_gpu = ranks_on_gpu
        self._device = device
        self._pools: list[torch.cuda.MemPool] = []
        self._one = torch.zeros(1, device=device)

    def barrier(self) -> None:
        """SymmetricMemory's."""
        self._handle.barrier(channel=0)

    def of_rank(self, rank: int, numel: int) -> torch.Tensor:
        """The first elements of that rank's ``buffer``."""
        there: torch.Tensor = self._handle.get_buffer(rank, (numel,), torch.bfloat16)
        return there

    def barriers(self) -> Calls:
        """Each barrier."""
        found: Calls = [("symm_mem", self.barrier)]
        if self.has_nccl:
            found.append(("nccl", partial(dist.all_reduce, self._one)))
        return found

    def two_shot_works(self, nbytes: int) -> bool:
        """torch 2.11's two-shot kernel ends in an illegal memory access of its own at 8 ranks on one GPU and 4 MiB; at 4 ranks,
        and at 512 KiB, it does not."""
        return self._ranks_on_gpu <= 4 or nbytes <= 512 << 10

    def copy_works_in_a_step(self, nbytes: int) -> bool:
        """Between other kernels, as in a model, torch 2.11's one_shot_all_reduce_copy ends in an illegal memory access at 8 ranks
        on one GPU and 256 KiB; at 64 KiB, or at 4 ranks, it does not."""
        return self._ranks_on_gpu <= 4 or nbytes <= 64 << 10

    def all_reduces(self, x: torch.Tensor) -> Calls:
        """Each all-reduce of ``x``.

        ``one_shot`` and ``two_shot`` take their input where it lies, in symmetric memory; ``one_shot_copy`` and ``two_shot,
        copied`` bring an ordinary tensor there first, as gpusync does, and the latter brings the result back.
        """
        there = self.buffer[: x.numel()]
        there.copy_(x)
        variants = torch.ops.symm_mem

        def two_shot_copied() -> torch.Tensor:
            there.copy_(x)
            variants.two_shot_all_reduce_(there, "sum", self.group_name)
            return there.clone()

        found: Calls = [
            ("symm_mem one_shot", partial(variants.one_shot_all_reduce, there, "sum", self.group_name)),
            (
                "symm_mem one_shot_copy",
                partial(variants.one_shot_all_reduce_copy, there, x, "sum", self.group_name),
            ),
        ]
        if self.two_shot_works(2 * x.numel()):
            found += [
                ("symm_mem two_shot", partial(variants.two_shot_all_reduce_, there, "sum", self.group_name)),
                ("symm_mem two_shot, copied", two_shot_copied),
            ]
        if self.has_nccl:
            found.append(("nccl", self.nccl_all_reduce(x)))
        return found

    def nccl_all_reduce(self, x: torch.Tensor) -> Callable[[], object]:
        """Of a tensor like ``x``, in place."""
        return partial(dist.all_reduce, torch.zeros_like(x))

    def nccl_symmetric(self, x: torch.Tensor) -> Callable[[], object]:
        """The same in memory that is registered for NCCL's symmetric kernels until ``close``. They use no multicast where
        NCCL_NVLS_ENABLE is 0."""
        group = dist.group.WORLD
        assert group is not None
        dist.all_reduce(self._one)  # registering needs a communicator
        backend = group._get_backend(self._device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            here = torch.zeros_like(x)
        backend.register_mem_pool(pool, symm=True)  # type: ignore[attr-defined]
        self._pools.append(pool)
        return partial(dist.all_reduce, here)

    def close(self) -> None:
        """Takes back what NCCL has registered. A pool's memory is NCCL's and has to go before the communicator does, and what
        lies in it before that: no graph may hold it any more."""
        group = dist.group.WORLD
        assert group is not None
        torch.cuda.synchronize()
        while self._pools:
            pool = self._pools.pop()
            group._get_backend(self._device).deregister_mem_pool(pool)  # type: ignore[attr-defined]
            del pool

"""What compute-sanitizer watches: every op on a few virtual ranks. Run by test_gpu_sanitizer.py.

    python sanitized.py RANKS|seeded

First a probe: can kernels of several ranks wait for one another under this tool? If not (it may run one kernel at a
time), the program goes on with a single rank, whose kernels wait for nobody.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
from gpu_ranks import drive, on, virtual_group
from op_bodies import ALGOS, Case, copies, layouts, messages, pushes, reductions, signals

from torch_gpusync import cuda_memory, virtual, virtual_buffers, virtual_ranks


def probe(n: int) -> bool:
    with virtual_group(n) as ranks:
        for sync in ranks:
            sync.timeout = 10.0
        for sync in ranks:
            with on(sync):
                sync.barrier()
        torch.cuda.synchronize()
        return not ranks[0].is_broken


def every_op(n: int) -> None:
    with virtual_group(n, buffer_bytes=1 << 16, channels=8, timeout=60.0) as ranks:
        drive(ranks, messages, 5)
        drive(ranks, signals, 3)
        drive(ranks, pushes, 4)
        drive(ranks, layouts)
        drive(ranks, copies, 1, [torch.float32, torch.int8])
        dtypes = (torch.bfloat16, torch.float32, torch.int64)
        drive(
            ranks,
            reductions,
            [Case(dtype, "sum", numel, 1, algo) for dtype in dtypes for numel in (5, 9001) for algo in ALGOS],
        )


class _TooSmall(cuda_memory.SharedInProcess):
    """The seeded bug: a buffer has less memory than it says."""

    def allocate(self, meeting: Any, nbytes: int, device: torch.device, what: str, *rest: Any) -> Any:
        return super().allocate(meeting, 512 if what == "buffer" else nbytes, device, what, *rest)


def seeded() -> None:
    with mock.patch.object(virtual, "SharedInProcess", _TooSmall):
        ranks = virtual_ranks(1, "cuda")
    (buffer,) = virtual_buffers(ranks, "small", (1 << 22,), torch.float32)
    buffer.put(torch.ones(1 << 22, device="cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1] == "seeded":
        seeded()
    else:
        wanted = int(sys.argv[1])
        ranks = wanted if wanted == 1 or probe(wanted) else 1
        every_op(ranks)
        print(f"done with {ranks} ranks", flush=True)

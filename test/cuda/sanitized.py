"""What compute-sanitizer watches: every op on a few virtual ranks. Run by test_gpu_sanitizer.py.

    python sanitized.py RANKS|seeded

Can kernels of several ranks wait for one another under this tool? It may hold a kernel back until another has ended, now
and then or always. If a wait is given up, the program goes on with a single rank, whose kernels wait for nobody.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
from gpu_ranks import drive, virtual_group
from norm_bodies import DTYPES as NORMED
from norm_bodies import Norm, norms
from op_bodies import ALGOS, Case, copies, exchanges, layouts, messages, pushes, reductions, signals

from torch_gpusync import cuda_memory, virtual, virtual_buffers, virtual_ranks
from torch_gpusync.testing import RankError


def every_op(n: int) -> bool:
    """False: a wait was given up."""
    with virtual_group(n, buffer_bytes=1 << 16, channels=8, timeout=15.0) as ranks:
        try:
            drive(ranks, messages, 5)
            drive(ranks, signals, 3)
            drive(ranks, pushes, 4)
            drive(ranks, layouts)
            drive(ranks, copies, 1, [torch.float32, torch.int8])
            drive(ranks, exchanges, (7, 515))
            drive(ranks, norms, [Norm(dtype, 3, 1000, start) for dtype in NORMED for start in (0, 1)])
            dtypes = (torch.bfloat16, torch.float32, torch.int64)
            drive(
                ranks,
                reductions,
                [
                    Case(dtype, "sum", numel, 1, algo)
                    for dtype in dtypes
                    for numel in (5, 9001)
                    for algo in ALGOS
                ],
            )
        except RankError as error:
            if all("SyncTimeoutError" in text for text in error.failed.values()):
                return False
            raise  # a rank found something else, for which its peers may have waited in vain
    return True


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
        ranks = int(sys.argv[1])
        if not every_op(ranks):
            ranks = 1
            assert every_op(1), "a rank waited for nobody, and gave up"
        print(f"done with {ranks} ranks", flush=True)

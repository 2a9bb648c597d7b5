"""Inter-GPU synchronisation inside PyTorch models: barriers, signals, symmetric buffers and small collectives as
``torch.ops.gpusync.*``, right under ``torch.compile`` and in CUDA graphs.

Start with :class:`SyncGroup`, or with :func:`virtual_ranks` to try it in one process.
"""

import sys

try:
    from torch_gpusync import _caches, _library, gradients, nn, transforms  # noqa: F401
    from torch_gpusync.buffer import SymmetricBuffer
    from torch_gpusync.errors import SyncError, SyncMismatchError, SyncTimeoutError
    from torch_gpusync.group import SyncGroup
    from torch_gpusync.virtual import virtual_buffers, virtual_ranks, virtual_reset
except Exception:
    # `python -m torch_gpusync doctor` imports this first, and is asked when it fails.
    if sys.argv[:2] != ["-m", "doctor"]:
        raise
else:
    _caches.separate()

__version__ = "0.1.0"

__all__ = [
    "SymmetricBuffer",
    "SyncError",
    "SyncGroup",
    "SyncMismatchError",
    "SyncTimeoutError",
    "include_path",
    "nn",
    "virtual_buffers",
    "virtual_ranks",
    "virtual_reset",
]


def include_path() -> str:
    """The folder to pass to a compiler as ``-I`` for ``#include <gpusync/pull_controller.h>`` and the other headers."""
    return str(_library.path().parent / "include")

"""Megatron's conjugate operators f and g (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3).

In tensor parallelism the output, and so its gradient, is the same on all ranks. The gradient of a plain
all_reduce would then count every rank's copy and come out ``world_size`` times too large; these two do not.
``sync`` is a :class:`~torch_gpusync.SyncGroup` or a :class:`~torch_gpusync.nn.SyncModule`.
"""

import torch

from torch_gpusync.methods import SyncMethods
from torch_gpusync.ops import ops


def copy_to_ranks(x: torch.Tensor, sync: SyncMethods) -> torch.Tensor:
    """Identity; the gradient is the sum of the ranks' gradients. Before a column-parallel layer.

    Args:
        x: the same on all ranks, any shape; dtypes as for :meth:`SyncGroup.all_reduce`.

    Returns:
        A contiguous copy of x (a compiler removes it).
    """
    return sync._call(ops.copy_to_ranks.default, x)  # type: ignore[no-any-return]


def reduce_from_ranks(x: torch.Tensor, sync: SyncMethods) -> torch.Tensor:
    """Sum over the ranks; the gradient passes unchanged. After a row-parallel layer.

    Args:
        x: this rank's summand, the same shape on all ranks; dtypes as for :meth:`SyncGroup.all_reduce`.
    """
    return sync._call(ops.reduce_from_ranks.default, x)  # type: ignore[no-any-return]

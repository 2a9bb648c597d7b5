"""Symmetric buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_gpusync.ops import ops

if TYPE_CHECKING:
    from torch_gpusync.methods import SyncMethods


class SymmetricBuffer:
    """Memory of the same shape and dtype on every rank, which every rank can write to and read from.

    Made by :meth:`SyncGroup.buffer`. ``put`` and ``get`` copy and never wait: a barrier or a signal between a
    put and the get that is to see it makes it visible. Two ranks that access the same elements without one
    have a data race.

    Attributes:
        name, shape, dtype: as given to :meth:`SyncGroup.buffer`, the same on all ranks.
    """

    def __init__(self, sync: SyncMethods, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.sync = sync
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def put(self, x: torch.Tensor, rank: int = -1, offset: int | torch.Tensor = 0) -> None:
        """Copy ``x`` into the buffer of ``rank``.

        Args:
            x: any shape and strides, of the buffer's dtype, on the group's device; taken in row-major order.
            rank: whose buffer; -1 is my own.
            offset: where in the buffer, flattened, counted in elements. A number is frozen in a CUDA graph; a
                tensor of one int64, on the group's device, may change between replays.

        Raises:
            SyncError: it does not fit or has another dtype; nothing was copied. (An offset that only the GPU
                knows breaks the group when it lies outside.)
        """
        if isinstance(offset, torch.Tensor):
            self.sync._call(ops.put.tensor_offset, self.name, x, rank, offset)
            return
        self.sync._call(ops.put.default, self.name, x, rank, offset)

    def get(
        self, rank: int = -1, size: Sequence[int] | None = None, offset: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """A copy of the buffer of ``rank``, or of a part of it. The result does not require grad.

        Args:
            rank: whose buffer; -1 is my own.
            size: shape of the result; default: the buffer's.
            offset: first element of the buffer, flattened; a number or a tensor as for :meth:`put`.

        Raises:
            SyncError: the part does not lie inside the buffer.
        """
        # Size and dtype are given to the op, so that a compiled graph does not depend on what is registered.
        shape = self.shape if size is None else size
        op = ops.get.tensor_offset if isinstance(offset, torch.Tensor) else ops.get.default
        part: torch.Tensor = self.sync._call(op, self.name, rank, shape, offset, self.dtype)
        return part

    def device_pointers(self) -> list[int]:
        """The address of every rank's part, as mapped into this process, for CUDA kernels of your own.

        Indexed by rank; row-major, of :attr:`shape` and :attr:`dtype`, aligned to 128 bytes. Valid as long as the
        group is open. See :meth:`SyncGroup.device_handle` for what orders accesses there.

        Raises:
            SyncError: the group is on the CPU, or closed.
        """
        return list(self.sync._ask_device("device_pointers", ops._cuda_parts, self.name))

    def __repr__(self) -> str:
        return f"SymmetricBuffer({self.name!r}, {list(self.shape)}, {self.dtype}, group={self.sync.name!r})"

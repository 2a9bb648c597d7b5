"""A group's ops as a module, for ``torch.export``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_gpusync.buffer import SymmetricBuffer
from torch_gpusync.group import SyncGroup
from torch_gpusync.methods import SyncMethods


class SyncModule(torch.nn.Module, SyncMethods):
    """A :class:`SyncGroup` inside a model that is to be exported: the same ops, by the same methods.

    ``torch.export`` lets a model mutate its own buffers only, so here the ordering token is one. It is no part of
    ``state_dict``, stays where the group is under ``.to()``, and copies of the module are for the same group. Without
    ``torch.export`` a plain ``SyncGroup`` as the model's attribute does as well.

    The exported program, and the package that AOTInductor makes of it, know the group by its name: where they are
    loaded, every rank makes a group of that name, with the same buffers, before it calls them.

    Args:
        sync: this rank's group.

    Attributes:
        sync: the group.
        token, name, rank, world_size: as in the group.
    """

    token: torch.Tensor
    _exportable = True

    def __init__(self, sync: SyncGroup) -> None:
        super().__init__()
        self.sync = sync
        self.name = sync.name
        self.rank = sync.rank
        self.world_size = sync.world_size
        self._norm_limits = sync._norm_limits
        self.register_buffer("token", sync.token, persistent=False)

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricBuffer:
        """Make a symmetric buffer, as :meth:`SyncGroup.buffer` does, whose ``put`` and ``get`` can be exported."""
        return self.use(self.sync.buffer(name, shape, dtype))

    def use(self, buffer: SymmetricBuffer) -> SymmetricBuffer:
        """A buffer that the group already has, with a ``put`` and ``get`` that can be exported."""
        return SymmetricBuffer(self, buffer.name, buffer.shape, buffer.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SyncModule:
        return self  # the token stays where the group is

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncModule:
        return SyncModule(self.sync)

    def extra_repr(self) -> str:
        return repr(self.sync)

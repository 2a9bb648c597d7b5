"""Building blocks for models."""

from torch_gpusync.nn import functional
from torch_gpusync.nn.sync_module import SyncModule

__all__ = ["SyncModule", "functional"]

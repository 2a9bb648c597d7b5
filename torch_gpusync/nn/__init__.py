"""Building blocks for models."""

from torch_gpusync.nn import functional

__all__ = ["functional"]

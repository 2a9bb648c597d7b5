"""``python -m torch_gpusync doctor``: what this machine and this build can do, and what stands in the way.

A probe that fails becomes a line of the report. Nothing is imported before the probe that needs it, so that
the report also comes when torch or the library does not load.
"""

from .cli import examine, main
from .finding import Finding

__all__ = ["Finding", "examine", "main"]

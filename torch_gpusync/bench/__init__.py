"""The benchmark: every op beside its alternatives, measured by the same processes in the same run.

``python -m torch_gpusync bench`` starts one process per rank, lets the alternatives ("peers") and gpusync
take turns, checks the data afterwards, and prints one table.
"""

from .cli import main
from .results import Measurement

__all__ = ["Measurement", "main"]

"""Which all-reduce algorithm ``auto`` takes on GPUs, and how wide: measured tables, each used only where it was made.

A table (``tuning/*.json``, written by ``python -m torch_gpusync bench --tune FILE``) says on what it was measured: the GPU,
whether ranks had a GPU each or shared one, and for how many ranks. Elsewhere the library's conservative defaults hold
(csrc/cuda/collectives.cu).
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

# csrc/include/gpusync/fingerprint.h, enum class Algo.
ALGO_NUMBERS = {"pull_one_shot": 1, "pull_two_shot": 2, "push_one_shot": 3}
_FOLDER = Path(__file__).parent / "tables"


def flatten(rows: list[dict[str, Any]]) -> list[int]:
    """Rows of ``max_bytes, algo, blocks, threads`` as the op ``_cuda_tune`` takes them."""
    return [
        number
        for row in rows
        for number in (row["max_bytes"], ALGO_NUMBERS[row["algo"]], row["blocks"], row["threads"])
    ]


@functools.cache
def _tables() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(_FOLDER.glob("*.json"))]


def find(gpu: str, ranks_on_gpu: int, world_size: int) -> list[int]:
    """The rows for these ranks, flattened; empty where none were measured.

    ``GPUSYNC_TUNING`` names a table of your own, which is looked at first.
    """
    tables = list(_tables())
    if own := os.environ.get("GPUSYNC_TUNING"):
        tables.insert(0, json.loads(Path(own).read_text()))
    for table in tables:
        measured_on = table["measured_on"]
        if measured_on["gpu"] == gpu and (measured_on["ranks_on_gpu"] > 1) == (ranks_on_gpu > 1):
            rows = table["rows"].get(str(world_size))
            if rows:
                return flatten(rows)
    return []

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
_MAX_THREADS = 512  # the kernels' launch bounds


def flatten(rows: list[dict[str, Any]]) -> list[int]:
    """Rows of ``max_bytes, algo, blocks, threads`` as the op ``_cuda_tune`` takes them."""
    return [
        number
        for row in rows
        for number in (row["max_bytes"], ALGO_NUMBERS[row["algo"]], row["blocks"], row["threads"])
    ]


def _checked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ValueError unless every row can be launched and the sizes rise."""
    before = 0
    for row in rows:
        max_bytes, algo, blocks, threads = (
            row.get(key) for key in ("max_bytes", "algo", "blocks", "threads")
        )
        if algo not in ALGO_NUMBERS:
            raise ValueError(f"{row}: algo is one of {', '.join(ALGO_NUMBERS)}")
        if not all(isinstance(number, int) for number in (max_bytes, blocks, threads)):
            raise ValueError(f"{row}: max_bytes, blocks and threads are integers")
        if not (
            before < row["max_bytes"] < 1 << 63 and row["blocks"] >= 1 and 1 <= row["threads"] <= _MAX_THREADS
        ):
            raise ValueError(
                f"{row}: max_bytes must rise, and a launch has 1 block at least of 1 to {_MAX_THREADS} threads"
            )
        before = row["max_bytes"]
    return rows


@functools.cache
def _tables() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(_FOLDER.glob("*.json"))]


def find(gpu: str, ranks_on_gpu: int, world_size: int) -> list[int]:
    """The rows for these ranks, flattened; empty where none were measured.

    ``GPUSYNC_TUNING`` names a table of your own, which is looked at first.

    Raises:
        ValueError: that file cannot be read, or its rows cannot be launched.
    """
    own = os.environ.get("GPUSYNC_TUNING")
    try:
        tables = [*([json.loads(Path(own).read_text())] if own else []), *_tables()]
        for table in tables:
            measured_on = table["measured_on"]
            if measured_on["gpu"] == gpu and (measured_on["ranks_on_gpu"] > 1) == (ranks_on_gpu > 1):
                rows = table["rows"].get(str(world_size))
                if rows:
                    return flatten(_checked(rows))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"GPUSYNC_TUNING={own} is no table of choices: {type(error).__name__}: {error}"
        ) from None
    return []

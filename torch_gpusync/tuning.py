"""Which all-reduce algorithm ``auto`` takes on GPUs, and how wide: measured tables, each used only where it was made.

A table (``tuning/*.json``, written by ``python -m torch_gpusync bench --tune FILE``) says on what it was measured: the GPU,
whether ranks had a GPU each or shared one, and for how many ranks. Rows with ``dtypes`` are for these, the others for all
dtypes that no row names. Elsewhere the library's conservative defaults hold
(csrc/cuda/collectives.cu).
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

# csrc/include/gpusync/fingerprint.h, enum class Algo and DType.
ALGO_NUMBERS = {"pull_one_shot": 1, "pull_two_shot": 2, "push_one_shot": 3}
DTYPE_NUMBERS = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4, "int32": 5, "int64": 6}
_FOLDER = Path(__file__).parent / "tables"
_MAX_THREADS = 512  # the kernels' launch bounds


def flatten(rows: list[dict[str, Any]]) -> list[int]:
    """Rows of ``max_bytes, algo, blocks, threads`` and perhaps ``dtypes`` as the op ``_cuda_tune`` takes them."""
    return [number for row in rows for number in _numbers(row)]


def _numbers(row: dict[str, Any]) -> tuple[int, ...]:
    dtypes = sum(1 << DTYPE_NUMBERS[name] for name in row.get("dtypes", ()))
    return row["max_bytes"], ALGO_NUMBERS[row["algo"]], row["blocks"], row["threads"], dtypes


def _checked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ValueError unless every row can be launched and the sizes rise."""
    last: dict[tuple[str, ...], int] = {}
    for row in rows:
        dtypes = tuple(row.get("dtypes", ()))
        max_bytes, algo, blocks, threads = (
            row.get(key) for key in ("max_bytes", "algo", "blocks", "threads")
        )
        if algo not in ALGO_NUMBERS:
            raise ValueError(f"{row}: algo is one of {', '.join(ALGO_NUMBERS)}")
        if unknown := [name for name in dtypes if name not in DTYPE_NUMBERS]:
            raise ValueError(f"{row}: {unknown[0]} is none of the dtypes that are reduced")
        if not all(isinstance(number, int) for number in (max_bytes, blocks, threads)):
            raise ValueError(f"{row}: max_bytes, blocks and threads are integers")
        if not (
            last.get(dtypes, 0) < row["max_bytes"] < 1 << 63
            and row["blocks"] >= 1
            and 1 <= row["threads"] <= _MAX_THREADS
        ):
            raise ValueError(
                f"{row}: max_bytes must rise, and a launch has 1 block at least of 1 to {_MAX_THREADS} threads"
            )
        last[dtypes] = row["max_bytes"]
    if () not in last:
        raise ValueError("rows without dtypes are missing: they are for all that no row names")
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

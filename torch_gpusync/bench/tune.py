"""``bench --tune``: which all-reduce algorithm, and how wide a launch, is fastest at each size."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from torch_gpusync import SyncGroup
from torch_gpusync.ops import ops
from torch_gpusync.tuning import flatten

from .cuda import graph_of, greatest, meet, multicast_off
from .launcher import Context

_SIZES = [1 << exponent for exponent in range(12, 25)]  # 4 KiB to 16 MiB
_GRAPH_CALLS = 100
# In a sample, unless fewer take this long: the ranks do not start at the same moment, and that has to count little.
_REPLAYS, _SAMPLE_S = 10, 0.005
_SAMPLES = 3
_SHAPES = {
    "pull_one_shot": [(16, 256), (32, 512), (64, 512), (128, 512)],
    "pull_two_shot": [(16, 512), (32, 512), (64, 512), (128, 512)],
    "push_one_shot": [(8, 128), (16, 256), (32, 256), (64, 256), (64, 512), (128, 128)],
}
# What is measured, and for which dtypes its rows are: the kernels know the number of ranks when compiled only for
# floating-point types of 16 and 32 bits (csrc/cuda/reduce.cuh), so that the others may have other choices.
_DTYPES: dict[tuple[str, ...], torch.dtype] = {
    (): torch.bfloat16,
    ("float64", "int32", "int64"): torch.float64,
}
# An algorithm that takes longer than the best by this factor is not tried at larger sizes again, unless it is catching up.
_HOPELESS = 3.0

_Timed = tuple[float, str, int, int]  # microseconds, algorithm, blocks, threads


def run_rank(context: Context, own_gpu: bool) -> list[dict[str, Any]]:
    """The fastest choice for each size, as rows of a table; the same on all ranks."""
    device = torch.device("cuda", context.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    multicast_off()
    context.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")
    sync = SyncGroup(device=device, channels=1, timeout=context.timeout_s)
    context.clean_up.callback(sync.close)
    return [
        {**row, **({"dtypes": list(names)} if names else {})}
        for names, dtype in _DTYPES.items()
        for row in _rows(sync, dtype, context)
    ]


def _rows(sync: SyncGroup, dtype: torch.dtype, context: Context) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    algos = dict(_SHAPES)
    behind: dict[str, float] = {}
    for nbytes in _SIZES:
        x = torch.randn(nbytes // dtype.itemsize, device=sync.device).to(dtype)
        timed: list[_Timed] = [
            (_time(sync, x, algo, blocks, threads), algo, blocks, threads)
            for algo, shapes in algos.items()
            for blocks, threads in shapes
        ]
        best = min(timed)
        algos, behind = _drop_hopeless(algos, timed, behind)
        rows.append(
            dict(zip(("median_us", "algo", "blocks", "threads"), best, strict=True), max_bytes=nbytes)
        )
        if context.rank == 0:
            context.progress(f"{dtype}, {nbytes} bytes: {best}")
    rows[-1]["max_bytes"] = (1 << 63) - 1
    return rows


def _drop_hopeless(
    algos: dict[str, list[tuple[int, int]]], timed: list[_Timed], behind: dict[str, float]
) -> tuple[dict[str, list[tuple[int, int]]], dict[str, float]]:
    """What is worth trying at the next size, and by which factor each algorithm is behind the best at this one. ``behind``: at
    the size before."""
    best = min(timed)[0]
    now = {algo: min(t for t, a, _, _ in timed if a == algo) / best for algo in algos}
    kept = {
        algo: algos[algo]
        for algo, factor in now.items()
        if factor < max(_HOPELESS, behind.get(algo, factor + 1))
    }
    return kept, now


def _time(sync: SyncGroup, x: torch.Tensor, algo: str, blocks: int, threads: int) -> float:
    """Microseconds per call, of the slowest rank: the median over replays of a graph."""
    row = {"max_bytes": (1 << 63) - 1, "algo": algo, "blocks": blocks, "threads": threads}
    ops._cuda_tune(sync.name, flatten([row]))
    replay = graph_of(lambda: ops.all_reduce.default(sync.token, sync.name, x, "sum", algo), _GRAPH_CALLS)

    def seconds(replays: int) -> float:
        meet()
        start = time.perf_counter()
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / replays

    replays = max(1, min(_REPLAYS, round(_SAMPLE_S / greatest(seconds(1)))))
    samples = [seconds(replays) for _ in range(_SAMPLES)]
    return round(greatest(statistics.median(samples)) / _GRAPH_CALLS * 1e6, 2)


def write(
    path: Path, gpu: str, ranks_on_gpu: int, description: str, rows: dict[int, list[dict[str, Any]]]
) -> None:
    """The table file."""
    table = {
        "measured_on": {"gpu": gpu, "ranks_on_gpu": ranks_on_gpu, "description": description},
        "rows": {str(world_size): _merged(found) for world_size, found in rows.items()},
    }
    path.write_text(json.dumps(table, indent=1) + "\n")


def _merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring sizes with the same choice share a row."""
    merged: list[dict[str, Any]] = []
    for row in rows:
        same = merged and all(
            merged[-1].get(key) == row.get(key) for key in ("algo", "blocks", "threads", "dtypes")
        )
        if same:
            merged[-1] = row
        else:
            merged.append(row)
    return merged

"""``bench --tune``: which all-reduce algorithm, and how wide a launch, is fastest at each size."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_gpusync import SyncGroup
from torch_gpusync.ops import ops
from torch_gpusync.tuning import flatten

from .cuda import graph_of, meet, multicast_off
from .launcher import Context

_SIZES = [1 << exponent for exponent in range(12, 25)]  # 4 KiB to 16 MiB
_GRAPH_CALLS = 100
_REPLAYS = 10  # in a sample: the ranks do not start at the same moment, and that has to count little
_SAMPLES = 3
_SHAPES = {
    "pull_one_shot": [(16, 256), (32, 512), (64, 512), (128, 512)],
    "pull_two_shot": [(16, 512), (32, 512), (64, 512), (128, 512)],
    "push_one_shot": [(8, 128), (16, 256), (32, 256), (64, 512), (128, 128)],
}
# Beyond this factor of the best, an algorithm is not tried at larger sizes again.
_HOPELESS = 3.0


def run_rank(context: Context, own_gpu: bool) -> list[dict[str, Any]]:
    """The fastest choice for each size, as rows of a table; the same on all ranks."""
    device = torch.device("cuda", context.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    multicast_off()
    context.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")
    sync = SyncGroup(device=device, channels=1, timeout=context.timeout_s)
    rows: list[dict[str, Any]] = []
    algos = dict(_SHAPES)
    try:
        for nbytes in _SIZES:
            x = torch.randn(nbytes // 2, device=device).to(torch.bfloat16)
            timed = [
                (_time(sync, x, algo, blocks, threads), algo, blocks, threads)
                for algo, shapes in algos.items()
                for blocks, threads in shapes
            ]
            best = min(timed)
            algos = {
                algo: shapes
                for algo, shapes in algos.items()
                if min(t for t, a, _, _ in timed if a == algo) < _HOPELESS * best[0]
            }
            rows.append(
                dict(zip(("median_us", "algo", "blocks", "threads"), best, strict=True), max_bytes=nbytes)
            )
            if context.rank == 0:
                context.progress(f"{nbytes} bytes: {best}")
    finally:
        sync.close()
        torch.cuda.synchronize()
        dist.destroy_process_group()
    rows[-1]["max_bytes"] = (1 << 63) - 1
    return rows


def _time(sync: SyncGroup, x: torch.Tensor, algo: str, blocks: int, threads: int) -> float:
    """Microseconds per call, of the slowest rank: the median over replays of a graph."""
    row = {"max_bytes": (1 << 63) - 1, "algo": algo, "blocks": blocks, "threads": threads}
    ops._cuda_tune(sync.name, flatten([row]))
    replay = graph_of(lambda: ops.all_reduce.default(sync.token, sync.name, x, "sum", algo), _GRAPH_CALLS)
    samples = []
    for _ in range(_SAMPLES):
        meet()
        start = time.perf_counter()
        for _ in range(_REPLAYS):
            replay()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / (_REPLAYS * _GRAPH_CALLS) * 1e6)
    slowest = torch.tensor([statistics.median(samples)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(slowest.item(), 2)


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
        same = merged and all(merged[-1][key] == row[key] for key in ("algo", "blocks", "threads"))
        if same:
            merged[-1] = row
        else:
            merged.append(row)
    return merged

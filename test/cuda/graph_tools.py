"""CUDA graphs of virtual ranks: one graph with a branch for each rank, or one graph a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_ranks import fresh_stream, on

from torch_gpusync import SyncGroup


def capture(
    ranks: Sequence[SyncGroup], body: Callable[[SyncGroup], Any]
) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """One graph in which the ranks' streams fork from one stream and join it again; what `body(sync)` returned for each rank."""
    graph = torch.cuda.CUDAGraph()
    main = fresh_stream(*(sync.stream for sync in ranks))
    results = []
    with torch.cuda.graph(graph, stream=main):
        for sync in ranks:
            assert sync.stream is not None
            sync.stream.wait_stream(main)
            with on(sync):
                results.append(body(sync))
        for sync in ranks:
            assert sync.stream is not None
            main.wait_stream(sync.stream)
    return graph, results


def capture_each(
    ranks: Sequence[SyncGroup], body: Callable[[SyncGroup], Any]
) -> tuple[list[torch.cuda.CUDAGraph], list[Any]]:
    """A graph for each rank, so that a rank can be left out of a replay."""
    graphs, results = [], []
    for sync in ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=sync.stream):
            results.append(body(sync))
        graphs.append(graph)
    return graphs, results


def replay(
    ranks: Sequence[SyncGroup], graphs: Sequence[torch.cuda.CUDAGraph], absent: Sequence[int] = ()
) -> None:
    """Replays each rank's graph on its stream, but for the `absent` ranks, and waits for the GPU."""
    for sync in ranks:
        if sync.rank not in absent:
            with on(sync):
                graphs[sync.rank].replay()
    torch.cuda.synchronize()

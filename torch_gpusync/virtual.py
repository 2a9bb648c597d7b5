"""Ranks inside one process, for tests and for people with one GPU or none."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_gpusync import _token, cuda_memory, reset
from torch_gpusync.arguments import as_device, as_seconds
from torch_gpusync.buffer import SymmetricBuffer
from torch_gpusync.cuda_memory import SharedInProcess
from torch_gpusync.errors import SyncError
from torch_gpusync.group import DEFAULT_TIMEOUT, MAX_RANKS, SyncGroup
from torch_gpusync.rendezvous import Rendezvous

_default_names = 0

# CUDA has 32 hardware queues: with more streams a rank may wait for a rank behind it in the same queue.
_MAX_STREAMS = 32


def _streams(n: int, device: torch.device) -> list[torch.cuda.Stream]:
    """``n`` streams of which no two are the same: torch deals them out from a pool, over and over."""
    streams: dict[int, torch.cuda.Stream] = {}
    while len(streams) < n:
        stream = torch.cuda.Stream(device)
        streams[stream.cuda_stream] = stream
    return list(streams.values())


def virtual_ranks(
    n: int,
    device: torch.device | str = "cpu",
    *,
    name: str | None = None,
    channels: int = 8,
    buffer_bytes: int | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
) -> list[SyncGroup]:
    """A group of ``n`` ranks in this process: threads on the CPU, streams on one GPU.

    The ranks go through the same protocol, over the same kind of memory, as ranks in processes do. Rank r's
    name is ``name/r`` and it has an ordering token of its own.

    On the CPU each rank is used by a thread of its own. On a GPU each has a stream, ``sync.stream``, which
    its ops and the work around them have to run on (``with torch.cuda.stream(sync.stream)``); one thread can
    drive them all, for no op waits on the host. More than 8 streams need ``CUDA_DEVICE_MAX_CONNECTIONS=32``
    in the environment before CUDA is initialised, or ranks may wait for ranks behind them in one hardware
    queue. No rank may get further ahead of the others than some hundred launches: CUDA blocks the host at about a
    thousand, and the launches that would make room may be its own. Buffers are made by all ranks at the same
    time, each from its thread, or with :func:`virtual_buffers`; a reset likewise, or with :func:`virtual_reset`.

    Args:
        n: number of ranks, 1 to 64; on a GPU 1 to 32.
        device: ``cpu`` or ``cuda``.
        name: default ``virtual``, then ``virtual1``, ... by order of creation.
        channels, buffer_bytes, timeout: as for :class:`SyncGroup`.

    Raises:
        SyncError: an argument is out of range, the name is in use, or there is too little memory.
    """
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_RANKS:
        raise SyncError(f"gpusync: virtual_ranks makes 1 to {MAX_RANKS} ranks, not {n!r}")
    if name is not None and (not isinstance(name, str) or not name):
        raise SyncError(f"gpusync: name must be a string that is not empty, not {name!r}")
    seconds = as_seconds(timeout)
    device = as_device(device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if on_gpu:
        if n > _MAX_STREAMS:
            raise SyncError(f"gpusync: virtual_ranks makes 1 to {_MAX_STREAMS} ranks on a GPU, not {n}")
        problem = cuda_memory.complain_of_device(device) or cuda_memory.complain_of_capture("a group")
        if problem:
            raise SyncError(f"gpusync: {problem}")
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    global _default_names
    if name is None:
        name = "virtual" if _default_names == 0 else f"virtual{_default_names}"
        _default_names += 1
    store = dist.HashStore()

    def make(rank: int) -> SyncGroup:
        sync = SyncGroup.__new__(SyncGroup)
        meeting = Rendezvous(store, rank, n, range(n), "gpusync")
        sync._set_up(
            meeting,
            lambda: meeting,
            peer_memory,
            device=device,
            shared_name=name,
            channels=channels,
            buffer_bytes=buffer_bytes,
            timeout=seconds,
            own_name=f"{name}/{rank}",
            token=tokens[rank],
        )
        sync.stream = streams[rank]
        return sync

    peer_memory = SharedInProcess()
    streams: list[Any] = _streams(n, device) if on_gpu else [None] * n
    tokens: list[Any] = [_token.new_token(device) for _ in range(n)]
    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(make, range(n)))


def virtual_buffers(
    ranks: Sequence[SyncGroup], name: str, shape: Sequence[int], dtype: torch.dtype
) -> list[SymmetricBuffer]:
    """:meth:`SyncGroup.buffer` for all ranks of :func:`virtual_ranks` at once, from one thread."""
    if ranks[0].device.type == "cuda" and (problem := cuda_memory.complain_of_capture("a buffer")):
        raise SyncError(f"gpusync: buffer '{name}': {problem}")
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda sync: sync.buffer(name, shape, dtype), ranks))


def virtual_reset(ranks: Sequence[SyncGroup]) -> None:
    """:meth:`SyncGroup.reset` for all ranks of :func:`virtual_ranks` at once, from one thread."""
    if not ranks or len(ranks) != ranks[0].world_size:
        raise SyncError(f"gpusync: virtual_reset takes all ranks of a group, and got {len(ranks)} of them")
    if ranks[0].device.type == "cuda":
        reset.complain_of_capture(ranks[0])  # here: the current stream is this thread's
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(lambda sync: sync.reset(), ranks))

"""Ranks for the GPU tests: virtual ones, each a thread and a stream, and processes that share the GPU.

A body is `body(sync, *args)`: what one rank does. It runs unchanged as a virtual rank and as a process.

While ranks wait for one another on the GPU, a body launches gpusync's own kernels, copies, and what load_kernels()
has loaded, and waits for its own stream only: inputs are made on the host before, results are compared on the host
after. `sync.buffer` makes the hosts meet. (CUDA loads a kernel at its first launch, and may wait then for every
kernel that runs: also for one that waits for this rank.) And a body waits for its stream every few hundred launches:
a host with a thousand of them pending is blocked, perhaps together with the other threads of its process.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch

import torch_gpusync
from torch_gpusync import SyncGroup, cuda_memory, virtual
from torch_gpusync.testing import run_ranks, run_threads

DEVICE = os.environ.get("GPUSYNC_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
RANKS = int(
    os.environ.get("GPUSYNC_TEST_RANKS", "3")
)  # of processes: fewer where each has a GPU and there are but two
PATIENCE = float(os.environ.get("GPUSYNC_TEST_PATIENCE", "110"))  # seconds that processes may take
TIMEOUT = 20.0  # seconds that a wait of a test may take that is not about timeouts

_MARGIN, _CANARY = 4096, 0xA5


class Canaries(cuda_memory.SharedInProcess):
    """Peer-visible memory of virtual ranks between two margins that nothing may write to."""

    def __init__(self) -> None:
        super().__init__()
        self._margins: list[torch.Tensor] = []

    def allocate(
        self, meeting: Any, nbytes: int, device: torch.device, *rest: Any
    ) -> tuple[torch.Tensor, list[int], Any]:
        whole, addresses, keep_alive = super().allocate(meeting, nbytes + 2 * _MARGIN, device, *rest)
        margins = [whole[:_MARGIN], whole[_MARGIN + nbytes :]]
        for margin in margins:
            margin.fill_(_CANARY)
        torch.cuda.current_stream(device).synchronize()
        self._margins += margins
        inner = whole[_MARGIN : _MARGIN + nbytes]
        return inner, [address + _MARGIN for address in addresses], [keep_alive, inner]

    def check(self) -> None:
        assert self._margins, "no memory was allocated through here"
        for margin in self._margins:
            written = (margin != _CANARY).nonzero().flatten().tolist()
            assert not written, f"bytes beside a pad or a buffer were written: {written[:8]}"


@functools.cache
def load_kernels() -> None:
    """Loads what bodies launch of torch's own."""
    torch.cuda._sleep(1000)
    floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    for dtype in (*floats, torch.int32, torch.int64, torch.uint8):
        x, one = torch.ones(64, dtype=dtype, device="cuda"), torch.ones(1, dtype=dtype, device="cuda")
        for size in (1, 2, 3, 64):
            for y in (x[:size], x[64 - size :], x[::2][:size]):
                y.fill_(1)
                y.zero_()
                y.add_(1)
                y.copy_(one.expand(y.shape))
                y.contiguous()
    torch.cuda.synchronize()


@contextmanager
def virtual_group(n: int, **options: Any) -> Iterator[list[SyncGroup]]:
    """`n` virtual ranks, closed at the end; on a GPU the memory around theirs is checked then."""
    if ON_GPU:
        load_kernels()
    memory: list[Canaries] = []

    def watched() -> Canaries:
        memory.append(Canaries())
        return memory[-1]

    with mock.patch.object(virtual, "SharedInProcess", watched):
        ranks = torch_gpusync.virtual_ranks(n, device=DEVICE, **{"timeout": TIMEOUT, **options})
    try:
        yield ranks
        if ON_GPU:
            torch.cuda.synchronize()
            memory[0].check()
    finally:
        if ON_GPU:
            torch.cuda.synchronize()
        for sync in ranks:
            sync.close()


def on(sync: SyncGroup) -> Any:
    """The stream of a virtual rank, as the current one."""
    return torch.cuda.stream(sync.stream) if sync.stream is not None else nullcontext()


def drive(
    ranks: Sequence[SyncGroup], body: Callable[..., Any], *args: Any, timeout: float = 90.0
) -> list[Any]:
    """Runs `body(sync, *args)` for every virtual rank, each in its own thread and on its own stream."""

    def run(rank: int) -> Any:
        sync = ranks[rank]
        with on(sync):
            result = body(sync, *args)
            settle(sync)
            return result

    return run_threads(run, len(ranks), timeout=timeout)


def in_processes(
    body: Callable[..., Any],
    *args: Any,
    n: int = RANKS,
    timeout: float = 90.0,
    env: Mapping[str, str] | None = None,
    lost: Sequence[int] = (),
    breaks: bool = False,
) -> list[Any]:
    """Runs `body(sync, *args)` in `n` processes that share the GPU, or have one each. Their group must be whole at the
    end, unless the test `breaks` it."""
    return run_ranks(_in_process, n, body, args, breaks, timeout=min(timeout, PATIENCE), env=env, lost=lost)


def take_gpu(rank: int) -> None:
    """Makes a GPU the process's current one: ranks have one each, as far as there are enough."""
    if ON_GPU:
        torch.cuda.set_device(rank % torch.cuda.device_count())


def _in_process(rank: int, body: Callable[..., Any], args: tuple[Any, ...], breaks: bool) -> Any:
    take_gpu(rank)
    sync = SyncGroup(device=DEVICE, timeout=TIMEOUT)
    result = body(sync, *args)
    if not breaks:
        settle(sync)
    return result


_meetings: WeakKeyDictionary[SyncGroup, int] = WeakKeyDictionary()


def meet(sync: SyncGroup) -> None:
    """Makes the hosts of all ranks meet."""
    _meetings[sync] = _meetings.get(sync, 0) + 1
    sync.buffer(f"meeting {_meetings[sync]}", (1,), torch.uint8)


def settle(sync: SyncGroup) -> None:
    """Waits for all that was launched on the current stream; the group must be whole then."""
    if ON_GPU:
        torch.cuda.current_stream().synchronize()
    sync.check()


def keep_pace(sync: SyncGroup, number: int) -> None:
    """Waits for the stream at every 50th `number`: see above."""
    if number % 50 == 49:
        settle(sync)


def late(microseconds: float) -> None:
    """Holds the current stream back (on the CPU: the thread)."""
    if ON_GPU:
        torch.cuda._sleep(int(microseconds * 1500))  # cycles, at 1.5 GHz or more
    else:
        time.sleep(microseconds * 1e-6)


def launch(
    ranks: Sequence[SyncGroup], call: Callable[[SyncGroup], Any], absent: Sequence[int] = ()
) -> list[Any]:
    """Makes the call on every virtual rank but the absent ones, and waits for the GPU."""
    results = []
    for sync in ranks:
        if sync.rank not in absent:
            with on(sync):
                results.append(call(sync))
    torch.cuda.synchronize()
    return results


def to_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def fresh_stream(*taken: torch.cuda.Stream | None) -> torch.cuda.Stream:
    """A stream that none of `taken` is, and no rank's: torch deals its streams out over and over, and virtual ranks have theirs
    from the pool of normal priority."""
    while True:
        stream = torch.cuda.Stream(priority=-1)
        if all(other is None or other.cuda_stream != stream.cuda_stream for other in taken):
            return stream


def tokens(ranks: Sequence[SyncGroup]) -> list[int]:
    """Ops executed on the device so far: each adds one to its rank's token."""
    torch.cuda.synchronize()
    return [int(sync.token.item()) for sync in ranks]

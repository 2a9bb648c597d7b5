"""Ops of one rank on several streams: those of one channel run one after the other, those of different channels do not wait
for one another."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from gpu_ranks import drive, fresh_stream, late, on, tokens, virtual_group
from op_bodies import messages

from torch_gpusync import SyncGroup, virtual_buffers
from torch_gpusync.testing import run_threads


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.001)
    return True


def marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that comes when all that was launched on the stream so far is done."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def test_one_channel_on_two_streams_is_serialised() -> None:
    """Every rank's barriers alternate between two streams that nothing else orders, and one of them is late. Were two of them
    under way at once, they would count one arrival twice, and a rank would wait for ever."""
    with virtual_group(3) as ranks:
        other = [fresh_stream(*(sync.stream for sync in ranks)) for _ in ranks]

        def body(sync: SyncGroup) -> None:
            streams = [sync.stream, other[sync.rank]]
            for k in range(400):
                with torch.cuda.stream(streams[k % 2]):
                    if (k + sync.rank) % 7 == 0:
                        late(40)
                    sync.barrier()
                    sync.pull_end()
            other[sync.rank].synchronize()

        before = tokens(ranks)
        drive(ranks, body)
        assert tokens(ranks) == [count + 800 for count in before]
        drive(ranks, messages, 20)


def test_all_reduce_on_two_streams_keeps_its_order() -> None:
    """Each call's data is right although the calls share their staging memory."""
    with virtual_group(3) as ranks:
        rounds, numel = 100, 70_000
        inputs = [[torch.full((numel,), 10.0 * k + r).cuda() for k in range(rounds)] for r in range(3)]
        other = [fresh_stream(*(sync.stream for sync in ranks)) for _ in ranks]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[torch.Tensor]:
            results = []
            for k in range(rounds):
                with torch.cuda.stream([sync.stream, other[sync.rank]][k % 2]):
                    if (k + sync.rank) % 5 == 0:
                        late(60)
                    results.append(sync.all_reduce(inputs[sync.rank][k]))
            other[sync.rank].synchronize()
            return results

        results = drive(ranks, body)
        for k in range(rounds):
            for r in range(3):
                assert torch.equal(results[r][k].cpu(), torch.full((numel,), 30.0 * k + 3)), (
                    f"round {k}, rank {r}"
                )


def test_case_29_a_second_stream_waits_for_the_barrier_only() -> None:
    """Rank 0: a barrier on stream A with 300 ms of work behind it, then a barrier of the same channel on stream B."""
    with virtual_group(3) as ranks:
        a = ranks[0].stream
        b = fresh_stream(*(sync.stream for sync in ranks))
        assert a is not None
        with torch.cuda.stream(a):
            ranks[0].barrier()
            late(300_000)
        work = marked(a)
        with torch.cuda.stream(b):
            ranks[0].barrier()
        second = marked(b)
        for sync in ranks[1:]:
            with on(sync):
                sync.barrier()
                late(100_000)
                sync.barrier()
        start = time.monotonic()
        assert not second.query()
        assert until(second.query), "the barrier on stream B did not end"
        assert not work.query(), (
            f"it waited for the work behind stream A's barrier ({time.monotonic() - start:.3f} s)"
        )


def test_channels_on_two_streams_do_not_wait_for_one_another() -> None:
    """Channel 1 waits for a rank that has not come; channel 2, a signal and a collective pass meanwhile."""
    with virtual_group(3) as ranks:
        other = [fresh_stream(*(sync.stream for sync in ranks)) for _ in ranks]
        inputs = [torch.full((1000,), float(sync.rank)).cuda() for sync in ranks]
        torch.cuda.synchronize()
        for sync in ranks[:2]:
            with on(sync):
                sync.barrier(1)
        waiting = [marked(sync.stream) for sync in ranks[:2] if sync.stream is not None]
        results = []
        for sync in ranks:
            with torch.cuda.stream(other[sync.rank]):
                sync.barrier(2)
                sync.signal((sync.rank + 1) % 3, 1)
                sync.wait_signal((sync.rank - 1) % 3, 1)
                results.append(sync.all_reduce(inputs[sync.rank]))
        passed = [marked(stream) for stream in other]
        assert until(lambda: all(event.query() for event in passed)), "channel 2 waits for channel 1"
        assert not any(event.query() for event in waiting), "channel 1 did not wait for rank 2"
        assert all(torch.equal(y.cpu(), torch.full((1000,), 3.0)) for y in results)
        with on(ranks[2]):
            ranks[2].barrier(1)
        assert until(lambda: all(event.query() for event in waiting)), "rank 2 came and channel 1 still waits"


def test_a_signal_passes_its_own_channels_wait() -> None:
    """A wait on one stream does not hold back the signal, on another stream of the rank, that it is waiting for."""
    with virtual_group(3) as ranks:
        other = fresh_stream(*(sync.stream for sync in ranks))
        with on(ranks[0]):
            ranks[0].wait_signal(0)
        assert ranks[0].stream is not None
        waiting = marked(ranks[0].stream)
        assert not waiting.query()
        with torch.cuda.stream(other):
            ranks[0].signal(0)
        assert until(waiting.query)


def test_two_host_threads_of_a_rank_share_a_channel() -> None:
    """Whichever thread's barrier is first, each counts once."""
    with virtual_group(3) as ranks:
        other = [fresh_stream(*(sync.stream for sync in ranks)) for _ in ranks]
        before = tokens(ranks)

        def body(index: int) -> None:
            sync = ranks[index % 3]
            stream = sync.stream if index < 3 else other[sync.rank]
            assert stream is not None
            with torch.cuda.stream(stream):
                for k in range(300):
                    if (k + index) % 11 == 0:
                        late(30)
                    sync.barrier(5)
                stream.synchronize()

        run_threads(body, 6)
        assert tokens(ranks) == [count + 600 for count in before]
        drive(ranks, messages, 20)


def test_default_stream_and_stream_guards() -> None:
    """A group of one rank on whatever stream is current: the default one, another, and inside a device guard."""
    with virtual_group(1) as ranks:
        (sync,) = ranks
        (buffer,) = virtual_buffers(ranks, "b", (4,), torch.float32)
        stream = fresh_stream(sync.stream)
        for k in range(50):
            x = torch.full((4,), float(k), device="cuda")
            buffer.put(x)
            sync.barrier()
            y = sync.all_reduce(buffer.get())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.device(0), torch.cuda.stream(stream):
                sync.barrier()
                z = sync.all_reduce(buffer.get() + y)
            torch.cuda.current_stream().wait_stream(stream)
            assert (y.tolist(), z.tolist()) == ([float(k)] * 4, [2.0 * k] * 4)

"""A broken group is made usable again in place, under the graphs that were captured before."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import drive, late, on, virtual_group
from graph_tools import capture_each, replay
from op_bodies import ALGOS, messages
from rank_tools import expect
from torch import Tensor

from torch_gpusync import SyncError, SyncGroup, SyncMismatchError, SyncTimeoutError, virtual_reset


def _hurry(ranks: list[SyncGroup], seconds: float) -> None:
    for sync in ranks:
        sync.timeout = seconds


@pytest.mark.parametrize("algo", ALGOS[1:])
def test_captured_graphs_go_on(algo: str) -> None:
    """An odd number of calls, so that both halves come first; what was pushed before must not be taken for new."""
    n = 3
    with virtual_group(n) as ranks:
        x = [torch.zeros(5000).cuda() for _ in ranks]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            results = [sync.all_reduce(x[sync.rank], algo=algo) for _ in range(3)]
            sync.barrier()
            sync.signal((sync.rank + 1) % n)
            sync.wait_signal((sync.rank - 1) % n)
            return results

        graphs, results = capture_each(ranks, body)

        def check(k: int) -> None:
            for rank in range(n):
                x[rank].fill_(rank + k)
            torch.cuda.synchronize()
            replay(ranks, graphs)
            for each in results:
                for y in each:
                    assert torch.equal(y.cpu(), torch.full((5000,), 3.0 + 3 * k)), (k, y[:4])

        check(1)
        check(2)
        for again, absent in enumerate([2, 0]):
            _hurry(ranks, 0.3)
            replay(ranks, graphs, [absent])
            for sync in ranks:
                assert expect(SyncTimeoutError, f"for rank {absent} ", sync.check).missing_ranks == [absent]
            with on(ranks[absent]):  # it comes late
                graphs[absent].replay()
            torch.cuda.synchronize()
            assert all(y.isnan().all() for y in results[absent])
            virtual_reset(ranks)
            _hurry(ranks, 20.0)
            for sync in ranks:
                sync.check()
            check(10 + again)
            check(20 + again)
            drive(ranks, messages, 5, again)


def test_after_a_mismatch_and_of_a_whole_group() -> None:
    with virtual_group(3) as ranks:
        for rank, sync in enumerate(ranks):
            with on(sync):
                sync.push_exit(1)
                late(50_000)  # until the hosts of all ranks have made their calls
                sync.barrier(fence=rank != 1)
        torch.cuda.synchronize()
        for sync in ranks:
            expect(SyncMismatchError, "does not match", sync.check)
        virtual_reset(ranks)
        drive(ranks, messages, 5)
        with on(ranks[0]):
            ranks[0].signal(1, 2)
        virtual_reset(ranks)
        drive(ranks, messages, 5, 1)
        _hurry(ranks, 0.3)
        with on(ranks[1]):
            ranks[1].wait_signal(0, 2)  # what was sent before is gone
        torch.cuda.synchronize()
        expect(SyncTimeoutError, "for rank 0 ", ranks[1].check)


def test_during_a_capture_it_is_refused() -> None:
    with virtual_group(1) as ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks[0].stream):
            ranks[0].barrier()
            expect(SyncError, "while a CUDA graph is captured: call it outside", ranks[0].reset)
        graph.replay()
        torch.cuda.synchronize()
        ranks[0].check()

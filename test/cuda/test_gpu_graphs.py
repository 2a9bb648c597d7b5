"""CUDA graphs: data is right at every replay, and each op runs once in every one of them."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from gpu_ranks import fresh_stream, late, on, tokens, virtual_group
from graph_tools import capture, capture_each, replay
from op_bodies import ALGOS
from reference_data import assert_same_bits, input_of, reduce_in_rank_order
from torch import Tensor

from torch_gpusync import SyncGroup, virtual_buffers


@pytest.mark.parametrize(("n", "replays"), [(3, 1000), (8, 300), (32, 60)])
def test_case_08_fresh_data_at_every_replay(n: int, replays: int) -> None:
    """n branches in one graph: put, barrier, get from every rank, and all-reduces. Inputs change between replays, and
    every replay's outputs are kept and compared."""
    with virtual_group(n) as ranks:
        numel, reduced = 64, 5000
        buffers = virtual_buffers(ranks, "x", (numel,), torch.float32)
        steps = torch.arange(replays, dtype=torch.float32)[:, None]
        data = [torch.arange(numel) + 100 * r + 1000 * steps for r in range(n)]
        tables = [rows.cuda() for rows in data]
        wide = [(torch.arange(reduced) % 100 + r + steps).bfloat16().cuda() for r in range(n)]
        x = [torch.zeros(numel).cuda() for _ in range(n)]
        y = [torch.zeros(reduced, dtype=torch.bfloat16).cuda() for _ in range(n)]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            r = sync.rank
            buffers[r].put(x[r])
            sync.barrier()
            seen = [buffers[r].get(peer) for peer in range(n)]
            sums = [sync.all_reduce(y[r], algo=algo) for algo in ALGOS[1:]]
            sync.barrier(1, fence=False)
            return [*seen, *sums, sync.all_reduce(x[r], "max")]

        graph, results = capture(ranks, body)
        before = tokens(ranks)
        kept: list[list[Tensor]] = []
        for k in range(replays):
            for r in range(n):
                x[r].copy_(tables[r][k])
                y[r].copy_(wide[r][k])
            graph.replay()
            kept.append([torch.stack([torch.stack(outputs[:n]) for outputs in results])])
            kept[k] += [torch.stack([outputs[i] for outputs in results]) for i in range(n, n + 4)]
        assert tokens(ranks) == [count + replays * (n + 7) for count in before]
        assert not any(sync.is_broken for sync in ranks)
        for k in range(replays):
            seen, *sums, largest = (part.cpu() for part in kept[k])
            everybody = torch.stack([rows[k] for rows in data])
            assert torch.equal(seen, everybody.expand(n, n, numel)), f"replay {k}"
            assert torch.equal(largest, everybody.max(0).values.expand(n, numel)), f"replay {k}"
            total = reduce_in_rank_order([rows[k].cpu() for rows in wide], "sum")
            assert all(torch.equal(part, total.expand(n, reduced)) for part in sums), f"replay {k}"


def test_case_01_a_million_barriers_with_a_message_around_each() -> None:
    """Counted on the device: each round a rank writes its number to all, meets, compares what it got, and meets again."""
    n, rounds, replays = 3, 250, 2000
    with virtual_group(n) as ranks:
        boards = virtual_buffers(ranks, "board", (n,), torch.int64)
        mine = [torch.full((1,), r, device="cuda") for r in range(n)]
        expected = [torch.arange(n, device="cuda") for _ in range(n)]
        wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(n)]

        def body(sync: SyncGroup) -> None:
            r = sync.rank
            for k in range(rounds):
                for peer in range(n):
                    boards[r].put(mine[r], peer, r)
                sync.barrier(0, k % 2 == 0)
                wrong[r].add_((boards[r].get() != expected[r]).sum())
                mine[r].add_(n)
                expected[r].add_(n)
                sync.barrier(1, fence=False)

        graph, _ = capture(ranks, body)
        before = tokens(ranks)
        for _ in range(replays):
            graph.replay()
        executed = [after - count for after, count in zip(tokens(ranks), before, strict=True)]
        assert executed == [replays * rounds * (n + 3)] * n
        assert [int(count) for count in wrong] == [0] * n
        assert [int(number) for number in mine] == [rounds * replays * n + r for r in range(n)]
        mine[0].add_(1)  # the check can fail: rank 0's messages are off by one from now on
        graph.replay()
        assert [int(count) for count in wrong] == [rounds] * n


@pytest.mark.parametrize("algo", ALGOS[1:])
def test_case_04_inputs_are_overwritten_right_after_the_call(algo: str) -> None:
    with virtual_group(3) as ranks:
        rounds, numel = 20, 70_000
        inputs = [[torch.full((numel,), 10.0 * k + r).cuda() for k in range(rounds)] for r in range(3)]
        x = [torch.zeros(numel).cuda() for _ in range(3)]
        garbage = torch.full((numel,), float("nan")).cuda()
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            results = []
            for k in range(rounds):
                x[sync.rank].copy_(inputs[sync.rank][k])
                if (k + sync.rank) % 3 == 0:
                    late(100)
                results.append(sync.all_reduce(x[sync.rank], algo=algo))
                x[sync.rank].copy_(garbage)
            return results

        graph, results = capture(ranks, body)
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            for k in range(rounds):
                for r in range(3):
                    assert torch.equal(results[r][k], torch.full((numel,), 30.0 * k + 3, device="cuda")), (
                        k,
                        r,
                    )


class _Step:
    """One captured step over `numel` elements, and how to check it."""

    def __init__(self, ranks: list[SyncGroup], numel: int, seed: int) -> None:
        self.ranks, self.inputs = ranks, [input_of(r, numel, torch.float32, seed) for r in range(3)]
        self.x = [x.cuda() for x in self.inputs]
        self.buffers = virtual_buffers(ranks, f"step{numel}", (numel,), torch.float32)

    def body(self, sync: SyncGroup) -> list[Tensor]:
        r = sync.rank
        self.buffers[r].put(self.x[r], (r + 1) % 3)
        sync.barrier()
        got = self.buffers[r].get()
        sync.pull_end()
        return [got, sync.all_reduce(self.x[r])]

    def load(self, seed: int) -> None:
        self.inputs = [input_of(r, self.x[0].numel(), torch.float32, seed) for r in range(3)]
        for r in range(3):
            self.x[r].copy_(self.inputs[r])

    def check(self, results: list[list[Tensor]]) -> None:
        total = reduce_in_rank_order(self.inputs, "sum")
        for r, (got, reduced) in enumerate(results):
            assert_same_bits(got.cpu(), self.inputs[(r - 1) % 3])
            assert_same_bits(reduced.cpu(), total)


def test_several_graphs_and_eager_calls_in_any_order() -> None:
    """Three graphs of one group and eager calls between them, at random; a fourth is captured and never replayed."""
    with virtual_group(3) as ranks:
        steps = [_Step(ranks, numel, numel) for numel in (10, 3000, 100_000)]
        captured = [capture(ranks, step.body) for step in steps]
        unused = capture(ranks, _Step(ranks, 77, 0).body)
        choice = random.Random(1)
        for k in range(150):
            number = choice.randrange(3)
            steps[number].load(k)
            torch.cuda.synchronize()
            if choice.random() < 0.3:
                results = []
                for sync in ranks:
                    with on(sync):
                        results.append(steps[number].body(sync))
                torch.cuda.synchronize()
            else:
                captured[number][0].replay()
                torch.cuda.synchronize()
                results = captured[number][1]
            steps[number].check(results)
            if k == 75:
                del unused
                gc.collect()
        assert not any(sync.is_broken for sync in ranks)


def test_one_channel_on_two_streams_inside_a_capture() -> None:
    """Each rank forks once more: its barriers and reductions alternate between two captured streams that nothing else orders."""
    with virtual_group(3) as ranks:
        other = [fresh_stream(*(sync.stream for sync in ranks)) for _ in ranks]
        x = [torch.zeros(70_000).cuda() for _ in ranks]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            side, own = other[sync.rank], sync.stream
            assert own is not None
            side.wait_stream(own)
            results = []
            for k in range(10):
                with torch.cuda.stream([own, side][k % 2]):
                    if (k + sync.rank) % 3 == 0:
                        late(40)
                    sync.barrier()
                    results.append(sync.all_reduce(x[sync.rank]))
            own.wait_stream(side)
            return results

        graph, results = capture(ranks, body)
        before = tokens(ranks)
        for k in range(50):
            for r in range(3):
                x[r].fill_(k + r)
            graph.replay()
            torch.cuda.synchronize()
            for y in (y for outputs in results for y in outputs):
                assert torch.equal(y, torch.full_like(y, 3.0 * k + 3)), f"replay {k}"
        assert tokens(ranks) == [count + 50 * 20 for count in before]


def test_offsets_in_device_tensors_move_between_replays() -> None:
    with virtual_group(3) as ranks:
        buffers = virtual_buffers(ranks, "ring", (100,), torch.int32)
        to = [torch.zeros((), dtype=torch.int64).cuda() for _ in ranks]
        source = [torch.zeros((), dtype=torch.int64).cuda() for _ in ranks]
        x = [torch.zeros(4, dtype=torch.int32).cuda() for _ in ranks]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> Any:
            r = sync.rank
            buffers[r].put(x[r], (r + 1) % 3, to[r])
            sync.barrier()
            got = buffers[r].get(size=(2, 3), offset=source[r])
            sync.barrier()
            return got

        graph, results = capture(ranks, body)
        model = torch.zeros(3, 100, dtype=torch.int32)
        choice = random.Random(0)
        for k in range(200):
            for r in range(3):
                values = torch.arange(4, dtype=torch.int32) + 10 * k + 10_000 * r
                x[r].copy_(values)
                where = choice.choice([0, 96, choice.randrange(97)])
                to[r].fill_(where)
                model[(r + 1) % 3, where : where + 4] = values
            starts = [choice.choice([0, 94, choice.randrange(95)]) for _ in ranks]
            for r in range(3):
                source[r].fill_(starts[r])
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            for r in range(3):
                assert torch.equal(results[r].cpu(), model[r, starts[r] : starts[r] + 6].view(2, 3)), (
                    f"replay {k}"
                )


def test_a_graph_for_each_rank() -> None:
    """Ranks that replay graphs of their own, on their own streams, while one of them runs eagerly."""
    with virtual_group(3) as ranks:
        step = _Step(ranks, 3000, 5)
        graphs, results = capture_each(ranks, step.body)
        for k in range(60):
            step.load(k)
            torch.cuda.synchronize()
            eager = k % 4
            if eager == 3:
                replay(ranks, graphs)
                step.check(results)
                continue
            with on(ranks[eager]):
                mine = step.body(ranks[eager])
            replay(ranks, graphs, absent=[eager])
            step.check([mine if r == eager else results[r] for r in range(3)])


def test_case_30_a_barrier_between_two_pointwise_kernels() -> None:
    """The kernel before it writes what a peer's kernel after it reads, in memory that the ops copy."""
    with virtual_group(3) as ranks:
        buffers = virtual_buffers(ranks, "y", (4096,), torch.float32)
        x = [torch.arange(4096, dtype=torch.float32).cuda() / 4096 + r for r in range(3)]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> Tensor:
            r = sync.rank
            late(30 * r)
            y = torch.sin(x[r]) * 2
            buffers[r].put(y)
            sync.barrier()
            z = torch.cos(buffers[r].get((r + 1) % 3)) + y
            sync.barrier()
            return z

        graph, results = capture(ranks, body)
        for k in range(50):
            for r in range(3):
                x[r].add_(0.01 * k)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            y = [torch.sin(x[r]) * 2 for r in range(3)]
            for r in range(3):
                torch.testing.assert_close(results[r], torch.cos(y[(r + 1) % 3]) + y[r])


@pytest.mark.parametrize("n", [3, 8])
def test_the_other_collectives_in_a_graph(n: int) -> None:
    rows = 500
    with virtual_group(n) as ranks:
        x = [torch.zeros(n * rows).cuda() for _ in ranks]
        torch.cuda.synchronize()

        def body(sync: SyncGroup) -> list[Tensor]:
            mine = x[sync.rank]
            results = [sync.all_gather(mine), sync.all_to_all(mine), sync.broadcast(mine, 1)]
            return [*results, sync.reduce_scatter(mine), sync.reduce(mine, n - 1, "max")]

        graph, results = capture(ranks, body)
        for k in range(50):
            values = [torch.arange(n * rows) % 97 + 100.0 * rank + k for rank in range(n)]
            for mine, value in zip(x, values, strict=True):
                mine.copy_(value)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            parts = [value.view(n, rows) for value in values]
            total, most = torch.stack(values).sum(0), torch.stack(values).max(0).values
            for rank, (gathered, exchanged, broadcast, scattered, reduced) in enumerate(results):
                assert torch.equal(gathered.cpu(), torch.cat(values))
                assert torch.equal(exchanged.cpu(), torch.cat([part[rank] for part in parts]))
                assert torch.equal(broadcast.cpu(), values[1])
                assert torch.equal(scattered.cpu(), total.view(n, rows)[rank])
                assert torch.equal(reduced.cpu(), most if rank == n - 1 else torch.zeros_like(most))

"""Making groups: what the memory is, what is refused and how, and what lives how long."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_ranks import DEVICE, drive, virtual_group
from graph_tools import capture
from op_bodies import ALGOS, COPIED_DTYPES, Case, copies, messages, reductions
from rank_tools import close_all, expect
from reference_data import DTYPES

from torch_gpusync import SyncError, SyncGroup, cuda_memory, tuning, virtual, virtual_buffers, virtual_ranks
from torch_gpusync.testing import run_ranks


def in_a_fresh_process(fn: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> Any:
    """Runs `fn(0, *args)` where CUDA has not been touched."""
    return run_ranks(fn, 1, *args, process_group=False, env=env, timeout=90)[0]


def _cases() -> list[Case]:
    return [Case(dtype, "sum", numel, 1, algo) for dtype in DTYPES for numel in (9, 40_000) for algo in ALGOS]


# ---- which algorithm


def test_auto_takes_the_tables_choice_for_size_and_dtype() -> None:
    last = {"max_bytes": 1 << 62, "blocks": 16, "threads": 256}
    rows: list[dict[str, Any]] = [
        {**last, "max_bytes": 1024, "algo": "push_one_shot"},
        {**last, "algo": "pull_one_shot"},
        {**last, "algo": "pull_two_shot", "dtypes": ["float64"]},
    ]
    wanted = {
        (torch.float32, 256): "push_one_shot",
        (torch.float32, 257): "pull_one_shot",
        (torch.float64, 1): "pull_two_shot",
        (torch.float64, 4000): "pull_two_shot",
    }
    with virtual_group(3) as ranks:
        for sync in ranks:
            cuda_memory.ops._cuda_tune(sync.name, tuning.flatten(rows))
        for (dtype, numel), algo in wanted.items():
            drive(ranks, reductions, [Case(dtype, "sum", numel)])
            calls = [line for line in ranks[0].dump().splitlines() if "all_reduce" in line]
            assert algo in calls[-1], (dtype, numel, calls[-1])


# ---- which GPU


def _by_uuid(rank: int, uuid: str) -> tuple[int, str]:
    with virtual_group(3) as ranks:
        drive(ranks, messages, 10)
        return torch.cuda.device_count(), str(ranks[0].device)


def test_case_21_visible_devices_by_uuid() -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert in_a_fresh_process(_by_uuid, uuid, env={"CUDA_VISIBLE_DEVICES": uuid}) == (1, "cuda:0")


def test_a_gpu_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    expect(
        SyncError,
        f"'cuda:{count}' was asked for, but torch sees {count} GPU",
        virtual_ranks,
        3,
        f"cuda:{count}",
    )
    with virtual_group(3) as ranks:
        drive(ranks, messages, 3)


def test_more_ranks_than_hardware_queues_are_refused() -> None:
    expect(SyncError, "1 to 32 ranks on a GPU, not 33", virtual_ranks, 33, DEVICE)
    with virtual_group(32) as ranks:
        assert len({sync.stream.cuda_stream for sync in ranks if sync.stream is not None}) == 32


def test_tensors_and_tokens_of_the_wrong_device() -> None:
    ops = torch.ops.gpusync
    on_cpu, on_gpu = torch.ones(4), torch.ones(4, device="cuda")
    cpu = virtual_ranks(1, "cpu", name="on the cpu")[0]
    with virtual_group(1) as (gpu,):
        cpu_buffer, gpu_buffer = cpu.buffer("b", (4,), torch.float32), gpu.buffer("b", (4,), torch.float32)
        where = torch.zeros((), dtype=torch.int64)
        for call, text in (
            (lambda: cpu.all_reduce(on_gpu), "CPU group|CPU tensor|is on the CPU|'cpu'"),
            (lambda: cpu_buffer.put(on_gpu), "CPU group|CPU tensor|is on the CPU|'cpu'"),
            (lambda: cpu_buffer.put(on_cpu, offset=where.cuda()), "CPU group|CPU tensor|is on the CPU|'cpu'"),
            (lambda: gpu.all_reduce(on_cpu), "needs a tensor on that device|'cpu'"),
            (lambda: gpu_buffer.put(on_cpu), "needs a tensor on that device|'cpu'"),
            (lambda: gpu_buffer.put(on_gpu, offset=where), "needs a tensor on that device|'cpu'"),
            (lambda: gpu_buffer.get(offset=where), "needs a tensor on that device|'cpu'"),
            (lambda: gpu_buffer.get(offset=where.cuda().int()), "one int64"),
            (lambda: gpu_buffer.get(offset=torch.zeros(2, dtype=torch.int64).cuda()), "one int64"),
            (lambda: gpu_buffer.put(on_gpu.double()), "dtype"),
        ):
            expect(SyncError, text, call)
        expect(RuntimeError, "is on a GPU", ops.barrier, torch.zeros(1, dtype=torch.int32), gpu.name)
        expect(
            RuntimeError, "is a CPU group", ops.barrier, torch.zeros(1, dtype=torch.int32).cuda(), cpu.name
        )
        expect(RuntimeError, "ordering token", ops.barrier, torch.zeros(1).cuda(), gpu.name)
        gpu_buffer.put(on_gpu)
        gpu.barrier()
        assert gpu.all_reduce(gpu_buffer.get()).tolist() == [1.0] * 4
        cpu.barrier()
    cpu.close()


# ---- peer access


class _Misdirected(cuda_memory.SharedInProcess):
    """Rank 0's mapping of rank 2's memory leads somewhere else."""

    elsewhere: list[torch.Tensor]

    def allocate(self, meeting: Any, nbytes: int, *rest: Any) -> tuple[torch.Tensor, list[int], Any]:
        memory, addresses, keep_alive = super().allocate(meeting, nbytes, *rest)
        if meeting.rank == 0:
            self.elsewhere = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda")]
            addresses[2] = self.elsewhere[0].data_ptr()
        return memory, addresses, keep_alive


def test_case_20_peer_memory_that_leads_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(virtual, "SharedInProcess", _Misdirected)
        text = "peer memory does not work .*rank 2 cannot see what was written by the GPU of rank 0"
        expect(SyncError, text, virtual_ranks, 3, DEVICE, name="misdirected")
    with virtual_group(3, name="misdirected") as ranks:
        drive(ranks, messages, 3)


class _FailingProbe:
    """The ops, but for one rank's probe, which fails in some way."""

    def __init__(self, failure: int | str) -> None:
        self._failure = failure

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.gpusync, name)

    def _cuda_probe(self, name: str, phase: int) -> list[int]:
        if not name.endswith("/1") or phase != 2:
            return list(torch.ops.gpusync._cuda_probe(name, phase))
        if isinstance(self._failure, str):
            raise RuntimeError(self._failure)
        return [self._failure]


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (2, "GPU of rank 1 cannot read from the GPU of rank 2"),
        ("gpusync: out of luck", "GPU of rank 1: gpusync: out of luck"),
    ],
)
def test_case_20_a_probe_that_fails_names_the_pair(
    monkeypatch: pytest.MonkeyPatch, failure: int | str, text: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cuda_memory, "ops", _FailingProbe(failure))
        expect(SyncError, text, virtual_ranks, 3, DEVICE, name="probed")
    with virtual_group(3, name="probed") as ranks:
        drive(ranks, messages, 3)


class _Unmapped(cuda_memory.SharedInProcess):
    def allocate(self, meeting: Any, nbytes: int, *rest: Any) -> tuple[torch.Tensor, list[int], Any]:
        memory, addresses, keep_alive = super().allocate(meeting, nbytes, *rest)
        if meeting.rank == 0:
            addresses[2] = 0x10000
        return memory, addresses, keep_alive


def _unmapped(rank: int) -> str:
    with mock.patch.object(virtual, "SharedInProcess", _Unmapped):
        return str(expect(SyncError, "peer memory does not work", virtual_ranks, 3, DEVICE))


def test_case_20_peer_memory_that_faults_is_an_error_and_no_hang() -> None:
    """The context is lost then, which only a process of its own may try; the error still names the pair."""
    assert "GPU of rank 0 cannot write to the GPU of rank 2" in in_a_fresh_process(_unmapped)


# ---- captures


def _captured_first(rank: int) -> None:
    """Every op, captured before any has run, in a process that has launched next to nothing."""
    ranks = virtual_ranks(3, DEVICE)
    buffers = virtual_buffers(ranks, "b", (64,), torch.float32)
    inputs = [{dtype: torch.zeros(100, dtype=dtype, device=DEVICE) for dtype in DTYPES} for _ in ranks]
    where = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def body(sync: SyncGroup) -> list[torch.Tensor]:
        r = sync.rank
        sums = [
            sync.all_reduce(x, op, algo)
            for x in inputs[r].values()
            for op in ("sum", "max")
            for algo in ALGOS
        ]
        buffers[r].put(inputs[r][torch.float32][:32], (r + 1) % 3)
        buffers[r].put(inputs[r][torch.float32][:32], (r + 1) % 3, where)
        sync.signal((r + 1) % 3)
        sync.wait_signal((r - 1) % 3)
        sync.push_epoch()
        sync.push_exit()
        sync.pull_start()
        got = [buffers[r].get(), buffers[r].get((r + 1) % 3, (32,), where)]
        sync.pull_end()
        sync.pull_end(1, True)
        sync.barrier(2, False)
        sync.barrier()
        return [*got, *sums]

    graph, results = capture(ranks, body)
    for k in range(3):
        for r in range(3):
            for x in inputs[r].values():
                x.fill_(k + r)
        where.fill_(32)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for r, (mine, theirs, *sums) in enumerate(results):
            assert mine.tolist() == [float(k + (r - 1) % 3)] * 64
            assert theirs.tolist() == [float(k + r)] * 32
            assert [float(y[99]) for y in sums] == (
                [3.0 * k + 3] * len(ALGOS) + [k + 2.0] * len(ALGOS)
            ) * len(DTYPES)


def test_case_35_every_op_can_be_captured_before_it_has_run() -> None:
    in_a_fresh_process(_captured_first)


def test_case_35_groups_and_buffers_made_during_a_capture_are_refused_without_spoiling_it() -> None:
    with virtual_group(1) as (sync,):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            text = "cannot be made while a CUDA graph is captured: make it before"
            expect(SyncError, text, virtual_ranks, 3, DEVICE)
            expect(SyncError, text, virtual_buffers, [sync], "late", (4,), torch.float32)
            expect(SyncError, text, sync.buffer, "late", (4,), torch.float32)
            sync.barrier()
        before = int(sync.token.item())
        for _ in range(3):
            graph.replay()
        assert int(sync.token.item()) == before + 3
        sync.buffer("late", (4,), torch.float32)


def test_groups_closed_during_a_capture_do_not_spoil_it() -> None:
    """By the capturing thread, and by another one, as garbage collection may do."""
    with virtual_group(1) as (sync,):
        first, second = (virtual_ranks(2, DEVICE) for _ in range(2))
        for ranks in (first, second):
            drive(ranks, messages, 2)
        closer = threading.Thread(target=close_all, args=(second,))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sync.barrier()
            close_all(first)
            closer.start()
            closer.join(60)
            sync.barrier()
        before = int(sync.token.item())
        graph.replay()
        assert int(sync.token.item()) == before + 2


# ---- memory


def _expandable(rank: int) -> None:
    """Everything from expandable segments: inputs, outputs, pads and buffers."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with virtual_group(3) as ranks:
        drive(ranks, reductions, _cases())
        drive(ranks, copies, 1, COPIED_DTYPES)
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def test_case_16_memory_from_expandable_segments() -> None:
    in_a_fresh_process(_expandable)


def test_case_16_memory_from_a_pool() -> None:
    pools = [torch.cuda.MemPool() for _ in range(3)]
    with virtual_group(3) as ranks:

        def body(sync: SyncGroup) -> str:
            with torch.cuda.use_mem_pool(pools[sync.rank]):
                return reductions(sync, _cases())

        assert len(set(drive(ranks, body))) == 1


def test_case_17_uninitialised_memory_is_never_read() -> None:
    """With every new tensor full of NaN, or of the largest integer, results are the same."""
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in (*COPIED_DTYPES, torch.uint8):
            torch.empty(33, dtype=dtype, device=DEVICE)  # loads the kernel that fills it
        assert torch.empty(5, device=DEVICE).isnan().all()
        with virtual_group(3) as ranks:
            drive(ranks, reductions, _cases())
            drive(ranks, copies, 1, COPIED_DTYPES)
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_outlives_its_owners_group_and_not_the_last_one() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    ranks = virtual_ranks(3, DEVICE, buffer_bytes=1 << 20)
    buffers = virtual_buffers(ranks, "b", (1 << 20,), torch.uint8)
    held = torch.cuda.memory_allocated() - before
    assert held >= 3 * (2 << 20)
    for sync in ranks[:2]:
        sync.close()
        # Peers may still write there.
        assert torch.cuda.memory_allocated() - before == held
    ranks[2].close()
    del buffers
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_groups_come_and_go() -> None:
    """No memory or handle is used up by groups that were closed. (What torch keeps for streams that it deals out again is
    given back before the looks.)"""

    def use() -> None:
        with virtual_group(3) as ranks:
            drive(ranks, messages, 2)

    def in_use() -> tuple[int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        use()
    reserved, descriptors = in_use()
    for _ in range(30):
        use()
    reserved_then, descriptors_then = in_use()
    assert reserved_then <= reserved
    assert descriptors_then <= descriptors + 2


# ---- company

_BUSY = """
import sys, time, torch
x = torch.randn(4096, 4096, device="cuda")
start = time.monotonic()
while time.monotonic() - start < 60:
    for _ in range(50):
        x = (x @ x).clamp(-1, 1)
    torch.cuda.synchronize()
    print("busy", flush=True)
"""


def test_case_22_another_process_keeps_the_gpu_busy() -> None:
    """Two processes that do matrix products all the time: slower, not stuck."""
    busy: Sequence[subprocess.Popen[str]] = []
    try:
        busy = [
            subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in busy:
            assert process.stdout is not None and process.stdout.readline() == "busy\n"
        with virtual_group(3) as ranks:
            drive(ranks, messages, 60)
            drive(ranks, reductions, _cases())
        assert all(process.poll() is None for process in busy)
    finally:
        for process in busy:
            process.kill()
            process.wait()

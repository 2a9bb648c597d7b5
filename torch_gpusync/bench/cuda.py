"""A rank of the benchmark on GPUs: CUDA graphs of many calls, and the host's time for eager ones."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from torch_gpusync import SyncGroup
from torch_gpusync.ops import ops

from . import decode
from .cuda_peers import Peers
from .launcher import Context
from .plan import Case, Plan
from .timing import Series, Subject, measure

GRAPH_CALLS = 200  # a graph's own launch is some 10 µs: 0.05 µs a call
_HOST_CALLS = 300  # fewer than the launch queue holds, so that the device does not hold the host up
_HOST_SAMPLES = 9
ALGOS = ("auto", "pull_one_shot", "pull_two_shot", "push_one_shot")


def run_rank(context: Context, plan: Plan) -> list[tuple[Case, list[Series]]]:
    """Measure every case of ``plan``; all ranks return the same subjects in the same order."""
    count = torch.cuda.device_count()
    device = torch.device("cuda", context.rank % count)
    torch.cuda.set_device(device)
    own_gpu = context.world_size <= count
    # NVLink multicast stays off: programs that use it can put shared GPUs out of service.
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
    if not own_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    context.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")
    sync = SyncGroup(device=device, channels=2, timeout=context.timeout_s)
    try:
        peers = Peers(max(case.nbytes for case in plan.cases), device, own_gpu)
        return [(case, _run_case(context, plan, case, sync, peers)) for case in plan.cases]
    finally:
        sync.close()
        torch.cuda.synchronize()
        dist.destroy_process_group()


def meet() -> None:
    """Ranks and devices: nobody goes on before all have come and finished."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # a CPU tensor: Gloo


def _greatest(value: float) -> float:
    everybodys = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(everybodys, dist.ReduceOp.MAX)
    return everybodys.item()


def _timer(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _run_case(context: Context, plan: Plan, case: Case, sync: SyncGroup, peers: Peers) -> list[Series]:
    def progress(text: str) -> None:
        if context.rank == 0:
            context.progress(f"{case}: {text}")

    progress("warming up")
    subjects = _subjects(case, sync, peers)
    series = measure(subjects, plan.sampling, timer=_timer, meet=meet, agree=_greatest, progress=progress)
    if case.op == "barrier":
        series += _host_times(sync, peers)
    return series


def graph_of(call: Callable[[], object], calls: int = GRAPH_CALLS) -> Callable[[], None]:
    """``calls`` calls in one CUDA graph."""
    for _ in range(3):
        call()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def _subjects(case: Case, sync: SyncGroup, peers: Peers) -> list[Subject]:
    if case.op == "decode":
        return decode.subjects(case, sync, peers)
    if case.op == "barrier":
        return _barrier_subjects(sync, peers)
    return _all_reduce_subjects(case, sync, peers)


def _in_graph(op: str, impl: str, call: Callable[[], object], is_peer: bool = False) -> Subject:
    return Subject(op, impl, graph_of(call), "graph", is_peer, GRAPH_CALLS)


def _barrier_subjects(sync: SyncGroup, peers: Peers) -> list[Subject]:
    subjects = [_in_graph("barrier", impl, call, True) for impl, call in peers.barriers()]
    subjects += [
        _in_graph("barrier", "gpusync", partial(ops.barrier.default, sync.token, sync.name)),
        _in_graph(
            "barrier", "gpusync no fence", partial(ops.barrier.default, sync.token, sync.name, 0, False)
        ),
        # The launch floor: a kernel that does next to nothing.
        _in_graph("nothing", "gpusync", partial(ops.push_exit.default, sync.token, sync.name)),
    ]
    return subjects


def _all_reduce_subjects(case: Case, sync: SyncGroup, peers: Peers) -> list[Subject]:
    x = torch.empty(case.nbytes // 2, dtype=torch.bfloat16, device=sync.device)
    draw = 0

    def refresh() -> None:
        nonlocal draw
        draw += 1
        generator = torch.Generator(device=sync.device).manual_seed(draw * sync.world_size + sync.rank)
        x.copy_(torch.randint(-8, 9, x.shape, generator=generator, device=sync.device))
        torch.cuda.synchronize()

    def check(call: Callable[[], torch.Tensor]) -> None:
        refresh()
        expected = x.float().cpu()
        dist.all_reduce(expected)
        torch.testing.assert_close(call().float().cpu(), expected, rtol=0, atol=0)  # small integers: exact
        meet()

    subjects: list[Subject] = []
    for impl, call in peers.all_reduces(x):
        subject = _in_graph("all_reduce", impl, call, True)
        subject.refresh = refresh
        subjects.append(subject)
    for algo in ALGOS:
        impl = "gpusync" if algo == "auto" else f"gpusync {algo}"
        call = partial(ops.all_reduce.default, sync.token, sync.name, x, "sum", algo)
        with torch.no_grad():
            subject = _in_graph("all_reduce", impl, call)
        subject.refresh, subject.check = refresh, partial(check, call)
        subjects.append(subject)
    return subjects


def _host_times(sync: SyncGroup, peers: Peers) -> list[Series]:
    """What an eager call costs the host, which does not wait for the device."""
    calls: list[tuple[str, Callable[[], object], bool]] = [
        *((impl, call, True) for impl, call in peers.barriers()),
        ("gpusync", partial(ops.barrier.default, sync.token, sync.name), False),
        ("SyncGroup", sync.barrier, False),
    ]
    result = []
    for impl, call, is_peer in calls:
        samples = []
        for _ in range(_HOST_SAMPLES):
            meet()
            start = time.perf_counter()
            for _ in range(_HOST_CALLS):
                call()
            samples.append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
        meet()
        result.append(Series("barrier host", impl, "eager", is_peer, _HOST_CALLS, samples))
    assert statistics.median(result[0].samples_us) > 0
    return result

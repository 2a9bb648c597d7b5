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

from . import cuda_exchange, decode
from .cuda_peers import Peers, nccl_works
from .latency import round_trips
from .launcher import Context
from .plan import EXCHANGES, Case, Plan, human
from .timing import Series, Subject, measure

GRAPH_CALLS = 200  # a graph's own launch is some 10 µs: 0.05 µs a call
_HOST_CALLS = 300  # fewer than the launch queue holds, so that the device does not hold the host up
_HOST_SAMPLES = 9
_LAUNCH = "a launch alone"
ALGOS = ("auto", "pull_one_shot", "pull_two_shot", "push_one_shot")


def run_rank(context: Context, plan: Plan) -> list[tuple[Case, list[Series]]]:
    """Measure every case of ``plan``; all ranks return the same subjects in the same order."""
    count = torch.cuda.device_count()
    device = torch.device("cuda", context.rank % count)
    torch.cuda.set_device(device)
    ranks_on_gpu = -(-context.world_size // count)
    multicast_off()
    if ranks_on_gpu > 1:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    context.init_process_group("cpu:gloo,cuda:nccl" if nccl_works(ranks_on_gpu) else "gloo")
    sync = SyncGroup(device=device, channels=2, timeout=context.timeout_s)
    context.clean_up.callback(sync.close)
    peers = Peers(max(case.nbytes for case in plan.cases), device, ranks_on_gpu)
    context.clean_up.callback(peers.close)
    context.clean_up.callback(decode.forget_graphs)
    return [(case, _run_case(context, plan, case, sync, peers)) for case in plan.cases]


def multicast_off() -> None:
    """NVLink multicast stays off: programs that use it can put shared GPUs out of service."""
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0", NVSHMEM_DISABLE_NVLS="1")


def meet() -> None:
    """Ranks and devices: nobody goes on before all have come and finished."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # a CPU tensor: Gloo


def greatest(value: float) -> float:
    """Of what the ranks pass."""
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
    subjects = _subjects(case, plan, sync, peers, progress)
    series = measure(subjects, plan.sampling, timer=_timer, meet=meet, agree=greatest, progress=progress)
    if case.op == "barrier":
        series += _host_times(sync, peers)
        series += round_trips(sync, plan.sampling.rounds, meet, greatest, progress)
    # So that a log has the figures even where a later case takes the run with it.
    medians = (f"{s.impl} {statistics.median(s.samples_us):.2f} ({s.op}, {s.mode})" for s in series)
    progress(f"µs on rank 0: {'; '.join(medians)}")
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


Progress = Callable[[str], None]


def _subjects(case: Case, plan: Plan, sync: SyncGroup, peers: Peers, progress: Progress) -> list[Subject]:
    attempt = partial(_attempt, progress)
    if case.op == "decode":
        if not peers.copy_works_in_a_step(case.nbytes):
            progress(f"symm_mem is left out: it fails at {human(case.nbytes)} with so many ranks on a GPU")
        return decode.subjects(case, sync, peers, attempt)
    if case.op == "barrier":
        return _barrier_subjects(sync, peers)
    if not peers.two_shot_works(case.nbytes):
        progress(
            f"symm_mem two_shot is left out: it fails at {human(case.nbytes)} with so many ranks on a GPU"
        )
    if case.op in EXCHANGES:
        return cuda_exchange.subjects(case, sync, peers, _in_graph, attempt)
    return _all_reduce_subjects(case, plan, sync, peers, attempt)


def _attempt(progress: Progress, impl: str, make: Callable[[], Subject]) -> list[Subject]:
    """A peer's subject; none, and why, where it cannot be made on some rank: the others' figures are not lost with it."""
    found: list[Subject] = []
    problem = ""
    progress(f"preparing {impl}")
    try:
        found = [make()]
    except Exception as error:  # whatever a peer's own code may raise
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if greatest(float(bool(problem))):
        progress(f"{impl} is left out: {problem or 'another rank failed'}")
        return []
    progress(f"{impl} is ready")
    return found


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


def _all_reduce_subjects(
    case: Case,
    plan: Plan,
    sync: SyncGroup,
    peers: Peers,
    attempt: Callable[[str, Callable[[], Subject]], list[Subject]],
) -> list[Subject]:
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
        subjects += attempt(impl, partial(_in_graph, "all_reduce", impl, call, True))
    if peers.has_nccl:
        subjects.append(Subject("all_reduce", "nccl", peers.nccl_all_reduce(x), is_peer=True))
        if plan.nccl_symmetric:
            impl = "nccl symmetric"
            subjects += attempt(
                impl, lambda: _in_graph("all_reduce", impl, peers.nccl_symmetric(x), is_peer=True)
            )
    for subject in subjects:
        subject.refresh = refresh
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
        # The floor: no eager call is faster than its launch.
        (_LAUNCH, partial(torch.cuda._sleep, 0), False),
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
        op = "nothing host" if impl == _LAUNCH else "barrier host"
        result.append(Series(op, impl, "eager", is_peer, _HOST_CALLS, samples))
    assert statistics.median(result[0].samples_us) > 0
    return result

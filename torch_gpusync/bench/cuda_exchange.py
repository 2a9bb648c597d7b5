"""The collectives in which ranks read one another's input, on GPUs: NCCL's, SymmetricMemory's and gpusync's, in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from torch_gpusync import SyncGroup
from torch_gpusync.ops import ops

from .cuda_peers import Peers
from .exchange import SRC, ExchangeData
from .plan import Case
from .timing import Subject

Call = Callable[[], torch.Tensor]
Capture = Callable[[str, str, Call, bool], Subject]  # (op, impl, call, is_peer): a graph of many calls


def subjects(
    case: Case,
    sync: SyncGroup,
    peers: Peers,
    capture: Capture,
    attempt: Callable[[str, Callable[[], Subject]], list[Subject]],
) -> list[Subject]:
    """What each rank gives is bf16 of ``case.nbytes``, rounded down to whole parts. A peer that cannot be captured is left
    out by ``attempt``."""
    data = ExchangeData(case.op, sync, case.nbytes, torch.bfloat16)
    torch.cuda.synchronize()
    result: list[Subject] = []
    calls = [*_nccl(case.op, data, peers), *_symm_mem(case.op, data, sync, peers)]
    for impl, call, whole in calls:
        for subject in attempt(impl, partial(capture, case.op, impl, call, True)):
            subject.refresh, subject.check = partial(_refresh, data), partial(data.check, whole)
            result.append(subject)
    ours = _gpusync(case.op, data, sync)
    with torch.no_grad():
        subject = capture(case.op, "gpusync", ours, False)
    subject.refresh, subject.check = partial(_refresh, data), partial(data.check, ours)
    return [*result, subject]


def _refresh(data: ExchangeData) -> None:
    data.refresh()
    torch.cuda.synchronize()


def _gpusync(op: str, data: ExchangeData, sync: SyncGroup) -> Call:
    more = (SRC,) if op == "broadcast" else ()
    return partial(getattr(ops, op).default, sync.token, sync.name, data.input, *more)


# (impl, what is timed, the same with the input brought to where it is expected)
Peer = tuple[str, Call, Call]


def _nccl(op: str, data: ExchangeData, peers: Peers) -> list[Peer]:
    if not peers.has_nccl:
        return []
    x, y = data.input, data.output

    def call() -> torch.Tensor:
        if op == "all_gather":
            dist.all_gather_into_tensor(y, x)
        elif op == "reduce_scatter":
            dist.reduce_scatter_tensor(y, x)
        elif op == "all_to_all":
            dist.all_to_all_single(y, x)
        else:
            dist.broadcast(x, SRC)
            return x
        return y

    return [("nccl", call, call)]


def _symm_mem(op: str, data: ExchangeData, sync: SyncGroup, peers: Peers) -> list[Peer]:
    """Without multicast SymmetricMemory has a kernel for reduce_scatter; the others a user writes as copies between two
    barriers. The input lies in symmetric memory already, or an ordinary tensor is copied there first ("copied")."""
    x, y = data.input, data.output
    n, numel = sync.world_size, x.numel()
    there = peers.buffer[:numel]
    there.copy_(x)
    if op == "reduce_scatter":
        # What its kernel takes: vectors of 16 bytes and these numbers of ranks.
        fits = n in (2, 4, 8) and numel % (8 * n) == 0 and peers.two_shot_works(2 * numel)
        if not (fits and hasattr(torch.ops.symm_mem, "reduce_scatter_out")):
            return []
        name = "symm_mem reduce_scatter_out"

        def call() -> torch.Tensor:
            torch.ops.symm_mem.reduce_scatter_out(there, peers.group_name, False, y)
            return y

    else:
        name = "symm_mem copies"
        inputs = [peers.of_rank(rank, numel) for rank in range(n)]
        if op == "broadcast":
            copies = [(y, inputs[SRC])]
        elif op == "all_gather":
            copies = list(zip(y.chunk(n), inputs, strict=True))
        else:
            parts = [source.chunk(n)[sync.rank] for source in inputs]
            copies = list(zip(y.chunk(n), parts, strict=True))

        def call() -> torch.Tensor:
            peers.barrier()
            for target, source in copies:
                target.copy_(source)
            peers.barrier()
            return y

    def whole() -> torch.Tensor:
        there.copy_(x)
        return call()

    return [(name, call, whole), (f"{name}, copied", whole, whole)]

"""What a rank does in the tests of all_reduce_rms_norm (see gpu_ranks.py for what a body may do)."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from gpu_ranks import meet, settle, to_device
from op_bodies import assert_same_bytes, raw
from reference_data import reduce_in_rank_order
from torch import Tensor

from torch_gpusync import SyncGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Norm(NamedTuple):
    dtype: torch.dtype
    rows: int
    columns: int
    start: int = 0  # of x, of everything else one more: nothing is aligned then
    bias: float = 0.0


def finite(rank: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def norm_of(total: Tensor, weight: Tensor, eps: float, bias: float) -> Tensor:
    wide = total.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.double() + bias)


def assert_close_to(norm: Tensor, exact: Tensor, what: object = "") -> None:
    """But for the last bit."""
    rtol = {torch.float32: 2e-6, torch.float16: 1.0 / 1024, torch.bfloat16: 1.0 / 128}[norm.dtype]
    torch.testing.assert_close(norm.cpu().double(), exact, rtol=rtol, atol=1e-6, msg=lambda m: f"{what}: {m}")


def _at(x: Tensor, start: int) -> Tensor:
    """On the device, `start` elements into its memory."""
    memory = to_device(torch.zeros(start + x.numel(), dtype=x.dtype))
    memory[start:].copy_(x.reshape(-1))
    return memory[start:].view(x.shape)


@torch.no_grad()
def norms(sync: SyncGroup, cases: list[Norm]) -> str:
    """The sum bit for bit as in steps, the norm but for its last bit; returns a digest of both."""
    eps = 1e-5
    plan = []
    for k, (dtype, rows, columns, start, bias) in enumerate(cases):
        xs = [finite(r, rows * columns, dtype, k).view(rows, columns) for r in range(sync.world_size)]
        residual = finite(98, rows * columns, dtype, k).view(rows, columns)
        weight = finite(99, columns, dtype, k)
        total = residual + reduce_in_rank_order(xs, "sum")
        behind = start + 1 if start else 0
        mine = (_at(xs[sync.rank], start), _at(residual, behind), _at(weight, behind), eps, bias)
        plan.append((mine, total, norm_of(total, weight, eps, bias)))
    settle(sync)
    meet(sync)
    results = []
    for number, (arguments, _, _) in enumerate(plan):
        results.append(sync.all_reduce_rms_norm(*arguments))
        if number % 3 == 2:
            settle(sync)
    settle(sync)
    digest = hashlib.sha256()
    for case, (norm, total), (_, wanted_total, wanted_norm) in zip(cases, results, plan, strict=True):
        assert_same_bytes(total, wanted_total, case)
        assert_close_to(norm, wanted_norm, case)
        digest.update(bytes(raw(norm).tolist()))
    return digest.hexdigest()


@torch.no_grad()
def norms_among_others(sync: SyncGroup, calls: int) -> None:
    """Between other calls, pushed and pulled, that use the same memory and the same counters."""
    n, rank = sync.world_size, sync.rank
    xs = [[finite(r, 6 * 256, torch.bfloat16, k).view(6, 256) for r in range(n)] for k in range(calls)]
    mine = [to_device(x[rank]) for x in xs]
    weight = to_device(finite(99, 256, torch.bfloat16, 0))
    settle(sync)
    meet(sync)
    results = []
    for k in range(calls):
        rows = 1 + k % 6
        results.append(
            (
                sync.all_reduce_rms_norm(mine[k][:rows], mine[0][:rows], weight, 1e-5),
                sync.all_reduce(mine[k], algo=("push_one_shot", "pull_one_shot", "pull_two_shot")[k % 3]),
                sync.all_gather(mine[k][:2]),
            )
        )
        if k % 20 == 19:
            settle(sync)
    settle(sync)
    for k, ((norm, total), reduced, gathered) in enumerate(results):
        rows = 1 + k % 6
        sums = reduce_in_rank_order(xs[k], "sum")
        assert_same_bytes(total, xs[0][rank][:rows] + sums[:rows], k)
        assert_close_to(norm, norm_of(total.cpu(), weight.cpu(), 1e-5, 0.0), k)
        assert_same_bytes(reduced, sums, k)
        assert_same_bytes(gathered, torch.cat([x[:2] for x in xs[k]]), k)

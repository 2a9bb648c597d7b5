"""What processes that share a GPU do through torch.compile, in its modes that record CUDA graphs.

Each function returns findings as text, none if all was right. Ops executed on the device are counted by the token
(each adds one), calls on the host by the groups' call numbers: a replayed graph has the first and not the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import DEVICE, late, take_gpu
from ordering_designs import CHANNEL, MEMBERS, N, Shipped
from ordering_programs import PROGRAMS
from torch import Tensor
from torch._dynamo.utils import counters

from torch_gpusync import SyncGroup
from torch_gpusync.testing import check_order

ROWS = 8


class Counts:
    """Ops of some groups of this process, on the device and on the host, since the last look."""

    def __init__(self, *groups: SyncGroup) -> None:
        self.groups = groups
        assert all(group.token is groups[0].token for group in groups), (
            "a process has one token for each device"
        )
        self.look()

    def look(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        device = int(self.groups[0].token.item())
        host = sum(torch.ops.gpusync._calls(group.name) for group in self.groups)
        before = getattr(self, "before", (device, host))
        self.before = (device, host)
        return device - before[0], host - before[1]


def everywhere(found: list[str]) -> bool:
    """Has any rank a finding? Ranks go on or stop together."""
    count = torch.tensor([len(found)])
    dist.all_reduce(count)
    return bool(count.item())


class Step:
    """Every kind of op of two groups, with matrix products and fused pointwise kernels between. Whole numbers that
    float32 holds exactly."""

    ops = 12

    def __init__(self, sync: SyncGroup, other: SyncGroup) -> None:
        self.sync, self.other, self.rank, self.n = sync, other, sync.rank, sync.world_size
        self.buffer = sync.buffer("step", (ROWS, N), torch.float32)
        self.w = 2 * torch.eye(N, device=DEVICE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        behind, before = (self.rank + 1) % self.n, (self.rank - 1) % self.n
        y = torch.relu(x @ self.w) + 1
        self.buffer.put(y)
        self.sync.barrier()
        z = self.buffer.get(behind) * 3
        self.sync.barrier(1, fence=False)
        self.other.signal(behind)
        total = self.sync.all_reduce(z - 2)
        self.other.wait_signal(before)
        self.other.pull_start()
        most = self.other.all_reduce(total @ self.w + y, "max", "pull_one_shot")
        self.other.pull_end()
        self.sync.barrier(2)
        least = self.sync.all_reduce(most - y, "min", "pull_two_shot")
        return torch.relu(most) * 2 + 1, z, least

    def data(self, rank: int, k: int) -> Tensor:
        return (torch.arange(ROWS * N).view(ROWS, N) % 17 + 3 * rank + k % 1000 - 5).float()

    def expected(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        y = [torch.relu(2 * self.data(r, k)) + 1 for r in range(self.n)]
        total = sum(3 * part - 2 for part in y)
        most = torch.stack([2 * total + part for part in y]).max(0).values
        return (
            torch.relu(most) * 2 + 1,
            y[(self.rank + 1) % self.n] * 3,
            torch.stack([most - part for part in y]).min(0).values,
        )


def inference(sync: SyncGroup, other: SyncGroup, mode: str, replays: int) -> list[str]:
    step = Step(sync, other)
    compiled = torch.compile(lambda x: step.forward(x), mode=mode, fullgraph=True)
    counts = Counts(sync, other)
    found: list[str] = []

    def call(function: Callable[[Tensor], Any], k: int, what: str) -> tuple[int, int]:
        x = step.data(step.rank, k).to(DEVICE)
        results = function(x)
        for index, (y, wanted) in enumerate(zip(results, step.expected(k), strict=True)):
            if not torch.equal(y.cpu(), wanted):
                found.append(
                    f"{what}, call {k}: result {index} is {y.cpu().unique()[:4]}, not {wanted.unique()[:4]}"
                )
        return counts.look()

    with torch.no_grad():
        if (eager := call(step.forward, 0, "eager")) != (Step.ops, Step.ops):
            found.append(f"eager ran (device, host) {eager} ops")
        executed = [call(compiled, k, "compiled") for k in range(1, 7)]
        if [device for device, _ in executed] != [Step.ops] * 6:
            found.append(f"ops executed in warm-up, record and replays: {executed}")
        if [host for _, host in executed[2:]] != [0] * 4:
            found.append(f"later calls were no replays: {executed}")
        if everywhere(found):
            return found
        mixed = [call(step.forward if k % 3 == 0 else compiled, k, "mixed") for k in range(7, 19)]
        if [device for device, _ in mixed] != [Step.ops] * 12:
            found.append(f"ops executed with eager calls between replays: {mixed}")
        # Many replays with fresh inputs, looked at on the device.
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        inputs = torch.stack([step.data(step.rank, k) for k in range(replays)]).to(DEVICE)
        wanted = [torch.stack([step.expected(k)[i] for k in range(replays)]).to(DEVICE) for i in range(3)]
        for k in range(replays):
            if (k + step.rank) % 97 == 0:
                late(300)
            for y, values in zip(compiled(inputs[k]), wanted, strict=True):
                wrong += (y != values[k]).sum()
        if int(wrong):
            found.append(f"{int(wrong)} wrong values in {replays} replays")
        if (executed_then := counts.look()) != (replays * Step.ops, 0):
            found.append(f"{replays} replays ran (device, host) {executed_then} ops")
    return found + skipped()


def normed(sync: SyncGroup, mode: str, replays: int) -> list[str]:
    """Residual, norm and all_reduce, twice in a row: what eager mode finds, in one op each. (The matrix products are
    exact, and so is what is normed.)"""
    rows, columns = 4, 256
    weight = torch.full((columns,), 2.0, device=DEVICE)
    identity = torch.eye(columns, device=DEVICE)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        norm, total = sync.all_reduce_rms_norm(x @ identity, x + 1, weight, 1e-6)
        return sync.all_reduce_rms_norm(torch.sign(norm) @ identity, total, weight, 1e-6, 1.0)

    compiled = torch.compile(step, mode=mode, fullgraph=True)
    counts = Counts(sync)
    found: list[str] = []
    with torch.no_grad():
        for k in range(replays):
            x = (torch.arange(rows * columns).view(rows, columns) % 13 + 5.0 * sync.rank + k - 30).to(DEVICE)
            wanted = step(x)
            eager = counts.look()
            seen = compiled(x)
            there = counts.look()
            if not torch.equal(seen[1], wanted[1]) or not torch.allclose(seen[0], wanted[0], rtol=1e-5):
                found.append(
                    f"call {k}: {[(a - b).abs().max().item() for a, b in zip(seen, wanted, strict=True)]}"
                )
            if eager[0] != 2 or there != (2, 2 if k < 2 else 0):
                found.append(f"call {k} ran (device, host) {there} ops, eager mode {eager}")
    return found + skipped()


def skipped() -> list[str]:
    """Has Inductor left CUDA graphs out?"""
    count = counters["inductor"]["cudagraph_skips"]
    return [f"CUDA graphs were skipped {count} times"] if count else []


def training(sync: SyncGroup, other: SyncGroup, mode: str, steps: int) -> list[str]:
    """Forward and backward with ops in both, new data and a new weight at each step."""
    rank, n = sync.rank, sync.world_size
    found: list[str] = []
    counts = Counts(sync, other)

    def forward(x: Tensor, w: Tensor) -> Tensor:
        y = sync.all_reduce(torch.sin(x) @ w)
        other.barrier()
        z = other.all_reduce(torch.cos(y) * (rank + 1))
        sync.barrier(3)
        return z @ w

    def inputs(r: int, k: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 * k + r)
        return [torch.rand(ROWS, N, generator=generator) - 0.5, torch.rand(N, N, generator=generator) - 0.5]

    def weight(r: int, k: int) -> Tensor:
        return torch.arange(ROWS * N).view(ROWS, N) % (5 + r) - 2.0 + k % 3

    def reference(k: int) -> list[Tensor]:
        everybody = [[t.requires_grad_() for t in inputs(r, k)] for r in range(n)]
        y = torch.stack([torch.sin(x) @ w for x, w in everybody]).sum(0)
        z = torch.stack([torch.cos(y) * (r + 1) for r in range(n)]).sum(0)
        outputs = [z @ w for _, w in everybody]
        sum((out * weight(r, k)).sum() for r, out in enumerate(outputs)).backward()  # type: ignore[union-attr]
        x, w = everybody[rank]
        assert x.grad is not None and w.grad is not None
        return [outputs[rank].detach(), x.grad, w.grad]

    def call(function: Callable[..., Tensor], k: int, what: str) -> tuple[int, int]:
        torch.compiler.cudagraph_mark_step_begin()
        mine = [t.to(DEVICE).requires_grad_() for t in inputs(rank, k)]
        output = function(*mine)
        (output * weight(rank, k).to(DEVICE)).sum().backward()
        results = [output.detach(), *(t.grad for t in mine)]
        for index, (y, wanted) in enumerate(zip(results, reference(k), strict=True)):
            if y is None or not torch.allclose(y.cpu(), wanted, rtol=1e-3, atol=2e-3):
                off = "missing" if y is None else f"off by {(y.cpu() - wanted).abs().max().item():.3g}"
                found.append(f"{what}, step {k}: result {index} is {off}")
        return counts.look()

    compiled = torch.compile(forward, mode=mode, fullgraph=True)
    eager = call(forward, 0, "eager")
    if eager != (6, 6):  # four forward, two all-reduces backward
        found.append(f"eager ran (device, host) {eager} ops")
    executed = [call(compiled, k, "compiled") for k in range(1, steps)]
    if [device for device, _ in executed] != [6] * (steps - 1):
        found.append(f"ops executed: {executed}")
    if [host for _, host in executed[3:]] != [0] * (steps - 4):
        found.append(f"later steps were no replays: {executed}")
    if not everywhere(found):
        mixed = [call(forward if k % 2 else compiled, k, "mixed") for k in range(steps, steps + 6)]
        if [device for device, _ in mixed] != [6] * 6:
            found.append(f"ops executed with eager steps between: {mixed}")
    return found + skipped()


class OnGpu(Shipped):
    """The groups of the ordering programs, on the GPU."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sync, self.buffer = {}, {}
        for key, members in MEMBERS.items():
            process_group = dist.new_group(list(members))
            if rank in members:
                self.sync[key] = SyncGroup(process_group, device=DEVICE, name=key, channels=len(CHANNEL))
                self.sync[key].timeout = 60.0
                self.buffer[key] = self.sync[key].buffer("data", (N, N), torch.float32)
        self.pairs = [key for key in self.sync if key != "world"]
        # What maps memory may wait for every kernel on the GPU: no rank's may wait for a rank that still sets up.
        dist.barrier()


def ordering(rank: int, name: str, mode: str) -> list[str]:
    """Do all ranks see what eager mode would have shown them; compiled on all ranks, and on one of them only?"""
    program, design = PROGRAMS[name], OnGpu(rank)
    w = 2 * torch.eye(N, device=DEVICE)
    found: list[str] = []

    def eager(x: Tensor) -> list[Tensor]:
        return program.run(design, x, w)

    compiled = torch.compile(eager, mode=mode, fullgraph=True)
    number = 0

    def step(function: Callable[[Tensor], list[Tensor]], what: str) -> None:
        nonlocal number
        number += 1
        if number % 3 == rank:
            late(2000)

        def value(r: int) -> float:
            return 1000.0 + 100 * number + 10 * r

        seen = [x.cpu() for x in function(torch.full((N, N), value(rank), device=DEVICE))]
        for index, (x, wanted) in enumerate(zip(seen, program.expect(rank, value), strict=True)):
            if not torch.equal(x, torch.full((N, N), wanted)):
                found.append(
                    f"{what}, step {number}: read {index} shows {x.unique().tolist()[:4]}, not {wanted}"
                )

    with torch.no_grad():
        step(eager, "eager")
        for _ in range(6):
            step(compiled, "compiled")
        if not everywhere(found):
            for lone in range(3):
                for _ in range(3):
                    step(compiled if rank == lone else eager, f"only rank {lone} compiled")
    return found + skipped()


def under_compile(rank: int, mode: str) -> dict[str, list[str]]:
    """All checks of one mode, in one process a rank: importing the compiler takes longer than any of them."""
    take_gpu(rank)
    sync = SyncGroup(device=DEVICE, name="first")
    other = SyncGroup(device=DEVICE, name="second")
    sync.timeout = other.timeout = 60.0  # a rank may compile while its peers wait
    found = {
        "inference": inference(sync, other, mode, 1000),
        "training": training(sync, other, mode, 10),
    }
    if mode == "reduce-overhead":
        torch._dynamo.reset()  # after training CUDA graphs are not replayed while a backward pass may still come
        found["norm"] = normed(sync, mode, 12)
        for name in PROGRAMS:
            found[f"ordering {name}"] = ordering(rank, name, mode)
            torch._dynamo.reset()
    for group in (sync, other):
        group.check()
    return found


def in_order(rank: int) -> int:
    """The ops of a step, as check_order saw them in eager mode and compiled without CUDA graphs."""
    take_gpu(rank)
    step = Step(SyncGroup(device=DEVICE, timeout=60.0), SyncGroup(device=DEVICE, name="other", timeout=60.0))
    return len(check_order(step.forward, step.data(rank, 3).to(DEVICE), backend="aot_eager", fullgraph=True))

"""A decode step: tensor-parallel blocks, a batch of few tokens, compiled with ``mode="reduce-overhead"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from torch_gpusync import SyncGroup

from .plan import Case
from .timing import Subject

if TYPE_CHECKING:
    from .cuda_peers import Peers

HIDDEN = 4096
_BLOCKS = 4  # in one step, so that the step's own launch counts little

Reduce = Callable[[torch.Tensor], torch.Tensor]
# Of a row-parallel layer's output and what goes around it: the next layer's input, and what goes around that.
Join = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Block(torch.nn.Module):
    """Attention without the attention, and an MLP: column- then row-parallel, an all-reduce behind each."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        super().__init__()

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            values = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / columns**0.5
            return torch.nn.Parameter(values, requires_grad=False)

        self.qkv = weight(3 * HIDDEN // world_size, HIDDEN)
        self.out = weight(HIDDEN, HIDDEN // world_size)
        self.up = weight(4 * HIDDEN // world_size, HIDDEN)
        self.down = weight(HIDDEN, 4 * HIDDEN // world_size)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, self.qkv).chunk(3, dim=-1)
        return F.linear(torch.sigmoid(q) * k + v, self.out)

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class Step(torch.nn.Module):
    """Blocks, one behind the other, with pre-norm."""

    def __init__(self, world_size: int, join: Join, device: torch.device) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(world_size, device) for _ in range(_BLOCKS))
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x, (HIDDEN,))
        for block in self.blocks:
            assert isinstance(block, Block)
            normed, x = self.join(block.attend(normed), x)
            normed, x = self.join(block.transform(normed), x)
        return x


def _in_steps(reduce: Reduce) -> Join:
    def join(y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + reduce(y)
        return F.rms_norm(x, (HIDDEN,)), x

    return join


def _in_one(sync: SyncGroup) -> Join:
    weight = torch.ones(HIDDEN, device=sync.device, dtype=torch.bfloat16)
    eps = torch.finfo(torch.bfloat16).eps  # rms_norm's own

    def join(y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sync.all_reduce_rms_norm(y, x, weight, eps)

    return join


def subjects(
    case: Case,
    sync: SyncGroup,
    peers: Peers,
    attempt: Callable[[str, Callable[[], Subject]], list[Subject]],
) -> list[Subject]:
    """The step with NCCL's all-reduce, symm_mem's and gpusync's, with the residual and the norm in gpusync's kernel, and
    without any all-reduce, which is the floor; ``case.nbytes`` is the activation's. A peer that cannot be compiled is left
    out by ``attempt``."""
    forget_graphs()  # of the case before, which would count towards the limit of recompilations
    batch = case.nbytes // (2 * HIDDEN)
    there = peers.buffer[: batch * HIDDEN].view(batch, HIDDEN)
    torch._dynamo.mark_static_address(there)  # a CUDA graph reads it where it lies, not a copy of it
    group_name = peers.group_name

    def nccl(x: torch.Tensor) -> torch.Tensor:
        functional = torch.ops._c10d_functional
        result: torch.Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", group_name))
        return result

    def symm_mem(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(there, x, "sum", group_name)
        return result

    found: list[Subject] = []
    works = peers.copy_works_in_a_step(case.nbytes)
    for impl, reduce in [("nccl", nccl)] * peers.has_nccl + [("symm_mem", symm_mem)] * works:
        found += attempt(impl, partial(_subject, impl, _in_steps(reduce), True, batch, sync))
    ours = [
        ("gpusync", _in_steps(sync.all_reduce)),
        ("gpusync all_reduce_rms_norm", _in_one(sync)),
        ("without all_reduce", _in_steps(lambda y: y)),
    ]
    return found + [_subject(impl, join, False, batch, sync) for impl, join in ours]


def forget_graphs() -> None:
    """Lets compiled steps and their CUDA graphs go. NCCL ends a communicator only when no graph holds work of it any more
    (https://github.com/pytorch/pytorch/issues/115388), so this comes before."""
    torch._dynamo.reset()


def _subject(impl: str, join: Join, is_peer: bool, batch: int, sync: SyncGroup) -> Subject:
    torch.manual_seed(sync.rank)
    model = Step(sync.world_size, join, sync.device)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
    torch.manual_seed(0)
    x = torch.randn(batch, HIDDEN, device=sync.device, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = compiled(x)
        return result

    for _ in range(4):
        step()
    torch.cuda.synchronize()

    def check() -> None:
        with torch.no_grad():
            actual, expected = step().float(), model(x).float()
            # As wholes: compiled code rounds to bf16 less often. A missing or wrong reduction is off by its own size.
            assert (actual - expected).norm() < 0.05 * expected.norm()
        torch.cuda.synchronize()

    return Subject("decode", impl, step, "compile", is_peer, _BLOCKS, check=check)

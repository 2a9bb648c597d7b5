"""Models for test_export.py, and what the ranks do with them. Every rank compares with the model itself, run eagerly."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_tools import check_health, expect
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torch_gpusync import SymmetricBuffer, SyncError, SyncGroup
from torch_gpusync.nn import SyncModule
from torch_gpusync.nn.functional import copy_to_ranks, reduce_from_ranks

N = 8
STEPS = 4
NAME = "served"  # what packages know the group by

Model = Callable[[Tensor], Tensor]


class Neighbours(nn.Module):
    """Reads a peer's activations between two barriers: another graph on each rank."""

    def __init__(self, sync: SyncModule, board: SymmetricBuffer) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.sync = sync
        self.board = board

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        self.board.put(y.detach())
        self.sync.barrier()
        peer = self.board.get((self.sync.rank + 1) % self.sync.world_size)
        self.sync.barrier()
        return self.sync.all_reduce(y * peer) + peer


class Alike(nn.Module):
    """The same graph on each rank; its parts meet in reductions."""

    def __init__(self, sync: SyncModule, board: SymmetricBuffer) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.sync = sync
        self.board = board

    def forward(self, x: Tensor) -> Tensor:
        self.board.put(self.linear(x).detach())
        self.sync.barrier()
        mine = self.board.get()
        hidden = torch.relu(self.linear(copy_to_ranks(x, self.sync)) + mine)
        total = reduce_from_ranks(hidden, self.sync) + self.sync.all_reduce(mine, "max")
        # The op as it is, which the method calls on GPUs only.
        norm, _ = torch.ops.gpusync.all_reduce_rms_norm(
            self.sync.token, self.sync.name, mine, total, self.linear.bias, 1e-5
        )
        return norm + total


class TwoGroups(nn.Module):
    def __init__(self, first: SyncModule, second: SyncModule) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        self.second.barrier()
        return self.second.all_reduce(torch.sin(self.first.all_reduce(x)))


class Plain(nn.Module):
    def __init__(self, sync: SyncGroup) -> None:
        super().__init__()
        self.sync = sync

    def forward(self, x: Tensor) -> Tensor:
        return self.sync.all_reduce(x)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(N, N, generator=torch.Generator().manual_seed(100 * step + rank))


def open_group(timeout: float = 60.0) -> tuple[SyncModule, SymmetricBuffer]:
    sync = SyncModule(SyncGroup(name=NAME, timeout=timeout))
    return sync, sync.buffer("board", (N, N), torch.float32)


def make(kind: type[Neighbours] | type[Alike], sync: SyncModule, board: SymmetricBuffer) -> nn.Module:
    """With the same weights in every process that makes one."""
    torch.manual_seed(1 + sync.rank)
    return kind(sync, board).eval()


def compare(what: str, model: Model, reference: Model, rank: int, first: int = 0) -> list[str]:
    """A few steps of each, with new data at every step: on all ranks the one, then on all ranks the other."""
    found = []
    for step in range(first, first + STEPS):
        x = inputs(rank, step)
        with torch.no_grad():
            wanted, seen = reference(x), model(x)
        if not torch.allclose(seen, wanted, rtol=1e-5, atol=1e-5):
            found.append(f"{what}, step {step}: off by {(seen - wanted).abs().max().item():.3g}")
    return found


def export(model: nn.Module, strict: bool) -> torch.export.ExportedProgram:
    return torch.export.export(model, (torch.zeros(N, N),), strict=strict)


def check_export(rank: int) -> list[str]:
    sync, board = open_group()
    found = []
    for kind in (Neighbours, Alike):
        model = make(kind, sync, board)
        for strict in (False, True):
            what = f"{kind.__name__}, strict={strict}"
            program = export(model, strict)
            found += compare(what, program.module(), model, rank)
            if any("token" in key for key in program.state_dict):
                found.append(f"{what}: the token is part of the state")
            found += _gradients(f"{what}, gradients", program, model, rank)
            functional = program.run_decompositions()
            found += compare(f"{what}, decomposed", functional.module(), model, rank, 10)
        file = io.BytesIO()
        torch.export.save(export(model, False), file)
        file.seek(0)
        found += compare(f"{kind.__name__}, loaded", torch.export.load(file).module(), model, rank, 20)
        draft = torch.export.draft_export(model, (inputs(rank, 0),))
        if not draft._report.successful():
            found.append(f"{kind.__name__}: draft_export complains: {draft._report}")
    two = TwoGroups(sync, SyncModule(SyncGroup(name="second", timeout=60.0)))
    for strict in (False, True):
        found += compare(f"two groups, strict={strict}", export(two, strict).module(), two, rank)
    found += compare("two groups, decomposed", export(two, True).run_decompositions().module(), two, rank)
    for strict in (False, True):
        try:
            export(Plain(sync.sync), strict)
        except Exception as error:
            if "torch_gpusync.nn.SyncModule" not in str(error):
                found.append(f"a plain group, strict={strict}: {error}")
        else:
            found.append(f"a plain group was exported, strict={strict}")
    check_health(sync.sync)
    return found


def _gradients(what: str, program: torch.export.ExportedProgram, model: nn.Module, rank: int) -> list[str]:
    exported = program.module()
    for each in (exported, model):
        (each(inputs(rank, 5)) * (rank + 1)).sum().backward()
    seen, wanted = (next(each.parameters()).grad for each in (exported, model))
    model.zero_grad()
    exported.zero_grad()
    # Both may hold the same parameter, and then the same gradient twice.
    if seen is None or wanted is None or not (torch.equal(seen, wanted) and wanted.abs().max() > 0):
        return [f"{what}: {seen} instead of {wanted}"]
    return []


def package(rank: int, folder: str) -> list[str]:
    """Makes a package of `Neighbours` on each rank, and rank 0 one of `Alike` for all; runs them here."""
    sync, board = open_group(timeout=300.0)
    found = []
    for kind in (Neighbours, Alike):
        model = make(kind, sync, board)
        path = package_of(kind, rank, folder)
        if kind is Neighbours or rank == 0:
            torch._inductor.aoti_compile_and_package(export(model, False), package_path=str(path))
        dist.barrier()  # compiled
        found += compare(
            kind.__name__, torch._inductor.aoti_load_package(str(path)), weights(kind, model), rank
        )
    check_health(sync.sync)
    return found


def serve(rank: int, folder: str) -> list[str]:
    """Another process, which exports nothing."""
    sync, board = open_group()
    found = []
    loaded: list[Any] = []
    for kind in (Neighbours, Alike):
        model = weights(kind, make(kind, sync, board))
        loaded.append(torch._inductor.aoti_load_package(str(package_of(kind, rank, folder))))
        found += compare(kind.__name__, loaded[-1], model, rank, 30)
        # Loaded once more, and used in turn: each copy has a token of its own.
        again = torch._inductor.aoti_load_package(str(package_of(kind, rank, folder)))
        found += compare(f"{kind.__name__}, again", again, loaded[-1], rank, 40)
    check_health(sync.sync)
    sync.sync.close()
    for each in loaded:
        expect(RuntimeError, f"this process has no group '{NAME}'", each, inputs(rank, 0))
    return found


def package_of(kind: type[nn.Module], rank: int, folder: str) -> Path:
    return Path(folder) / f"{kind.__name__}{'' if kind is Alike else rank}.pt2"


def weights(kind: type[nn.Module], model: nn.Module) -> nn.Module:
    """The shared package has rank 0's weights on all ranks."""
    if kind is Alike:
        torch.manual_seed(1)
        model.linear = nn.Linear(N, N)  # type: ignore[assignment]
    return model


def check_module(rank: int) -> list[str]:
    """What PyTorch does to modules does nothing to the group inside."""
    sync, board = open_group()
    model = make(Alike, sync, board)
    token = sync.sync.token
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]
    assert dict(model.named_buffers())["sync.token"] is token
    twin = copy.deepcopy(model)
    assert twin.sync is not sync and twin.sync.sync is sync.sync and twin.sync.token is token
    twin.load_state_dict(model.state_dict())
    found = compare("a copy", twin, model, rank)
    for move in ("double", "half", "float", "cpu", "share_memory"):
        getattr(twin, move)()
        assert twin.sync.token is token
    twin.to("meta")
    assert twin.sync.token is token and twin.linear.weight.is_meta
    twin.to_empty(device="cpu").load_state_dict(model.state_dict())
    found += compare("there and back", twin, model, rank, 10)
    found += compare("compiled", torch.compile(twin, backend="aot_eager", fullgraph=True), model, rank, 20)
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        # DDP broadcasts buffers before each forward pass, and FSDP moves them: the token takes it.
        torch.manual_seed(1)
        model.linear, twin.linear = nn.Linear(N, N), nn.Linear(N, N)
        twin.load_state_dict(model.state_dict())
        wrapped = wrap(copy.deepcopy(twin))
        found += compare(wrap.__name__, wrapped, twin, rank, 30)
        assert next(iter(wrapped.buffers())) is token
    expect(TypeError, "cannot be pickled: .* Save the model's state_dict", pickle.dumps, model)
    expect(TypeError, "cannot be pickled", torch.save, model, io.BytesIO())
    assert NAME in repr(model)
    expect(SyncError, "already has a buffer", sync.buffer, "board", (1,), torch.int32)
    check_health(sync.sync)
    return found


def check_stale(rank: int) -> list[str]:
    """The same comparison for an export that is wrong: the peers' part frozen at what it was when it was exported."""
    sync, board = open_group()
    model = make(Alike, sync, board)
    frozen = sync.all_reduce(inputs(rank, 0))
    return compare(
        "frozen", lambda x: torch.relu(x) + frozen, lambda x: torch.relu(x) + sync.all_reduce(x), rank
    ) + (compare("right", model, model, rank))

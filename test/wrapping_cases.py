"""What a model can be wrapped in, each beside the same model as it is, run eagerly on the same ranks with the same data.

A case is a function that is given the rank's `Bench`, wraps a model, and has both trained for a few steps: outputs,
gradients and updated weights must agree on every rank, at every step, with data that differ by rank and step.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rank_tools import check_health, expect
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torch_gpusync import SymmetricBuffer, SyncError, SyncGroup
from torch_gpusync.testing import executed_ops

RANKS = 3
N = 6
STEPS = 3


class Exchange(nn.Module):
    """Reads a peer's activations between two barriers, then reduces: both have to be right for the loss to be."""

    def __init__(self, sync: SyncGroup, board: SymmetricBuffer) -> None:
        super().__init__()
        self.first = nn.Linear(N, N)
        self.second = nn.Linear(N, N)
        self.sync = sync
        self.groups = {"also": [sync]}  # in containers, too
        self.board = board

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        self.board.put(y.detach())
        self.sync.barrier()
        peer = self.board.get((self.sync.rank + 1) % self.sync.world_size, size=y.shape)
        self.sync.barrier()
        y = self.groups["also"][0].all_reduce(y * peer)
        return self.second(y)  # type: ignore[no-any-return]


class Bench:
    """One rank's groups, and the comparison."""

    def __init__(self, rank: int, timeout: float = 90.0) -> None:
        self.rank = rank
        self.sync = SyncGroup(timeout=timeout)
        self.boards = {
            dtype: self.sync.buffer(str(dtype), (4 * N, N), dtype)
            for dtype in (torch.float32, torch.float64, torch.bfloat16)
        }
        self.step = 0

    def model(self, dtype: torch.dtype = torch.float32) -> Exchange:
        """With the same weights on every rank, as data parallelism wants them."""
        torch.manual_seed(3)
        return Exchange(self.sync, self.boards[dtype]).to(dtype)

    def data(self, rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.step + self.rank)
        return torch.randn(rows, N, generator=generator).to(dtype)

    def train(
        self,
        wrapped: nn.Module,
        model: nn.Module,
        *,
        parallel: bool = False,
        rows: Iterable[int] = (4,) * STEPS,
        dtype: torch.dtype = torch.float32,
    ) -> list[str]:
        """`parallel`: what wraps the model averages gradients over the ranks."""
        found = []
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
        for count in rows:
            self.step += 1
            x = self.data(count, dtype)
            wanted = self._step(model, x, average=parallel)
            seen = self._step(wrapped, x, average=False)
            for name, a, b in zip(("output", "gradient of x", *_names(model)), seen, wanted, strict=True):
                if not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
                    found.append(f"step {self.step}: {name} is off by {(a - b).abs().max().item():.3g}")
        return found

    def _step(self, model: nn.Module, x: Tensor, average: bool) -> list[Tensor]:
        x = x.clone().requires_grad_()
        model.zero_grad()
        output = model(x)
        (output * (1.0 + 0.5 * self.rank)).sum().backward()
        gradients = []
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None and x.grad is not None
            if average:
                dist.all_reduce(gradient)
                gradient /= RANKS
            with torch.no_grad():
                parameter -= 0.05 * gradient
            gradients.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone())
        assert x.grad is not None
        return [output.detach(), x.grad, *gradients]


def _names(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_parameters():
        yield f"gradient of {name}"


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model = model
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def ddp(bench: Bench) -> list[str]:
    return bench.train(DistributedDataParallel(bench.model()), bench.model(), parallel=True)


def ddp_compiled(bench: Bench) -> list[str]:
    wrapped = torch.compile(DistributedDataParallel(bench.model()), backend="aot_eager")
    return bench.train(wrapped, bench.model(), parallel=True)  # type: ignore[arg-type]


def fsdp2(bench: Bench) -> list[str]:
    wrapped = bench.model()
    fully_shard(wrapped.first)
    fully_shard(wrapped)
    return bench.train(wrapped, bench.model(), parallel=True)


def fsdp2_compiled(bench: Bench) -> list[str]:
    wrapped = bench.model()
    fully_shard(wrapped)
    wrapped.compile(backend="aot_eager")
    return bench.train(wrapped, bench.model(), parallel=True)


def checkpointing_reentrant(bench: Bench) -> list[str]:
    return bench.train(Checkpointed(bench.model(), True), bench.model())


def checkpointing(bench: Bench) -> list[str]:
    return bench.train(Checkpointed(bench.model(), False), bench.model())


def checkpointing_compiled(bench: Bench) -> list[str]:
    found = []
    for backend in ("aot_eager", "inductor"):
        wrapped = torch.compile(Checkpointed(bench.model(), False), backend=backend, fullgraph=True)
        found += bench.train(wrapped, bench.model())  # type: ignore[arg-type]
    return found


def recompiles(bench: Bench) -> list[str]:
    found = []
    for dynamic in (None, True):
        for dtype in bench.boards:
            wrapped = torch.compile(bench.model(dtype), backend="aot_eager", fullgraph=True, dynamic=dynamic)
            found += bench.train(wrapped, bench.model(dtype), rows=(4, 3, 5, 4, 2), dtype=dtype)  # type: ignore[arg-type]
    return found


def several_functions(bench: Bench) -> list[str]:
    """Two compiled functions and an eager one use one group in turn, from one model's weights."""

    class InTurn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = bench.model()
            self.calls = 0
            self.functions: list[Callable[[Tensor], Tensor]] = [
                torch.compile(self.model.forward, backend="inductor", fullgraph=True),
                torch.compile(lambda x: self.model(x + 0), backend="aot_eager", fullgraph=True),
                self.model,
            ]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.functions[self.calls % 3](x)

    return bench.train(InTurn(), bench.model(), rows=(4,) * 7)


def inference_mode(bench: Bench) -> list[str]:
    """A group made inside serves outside, and the other way round; eager and compiled."""
    with torch.inference_mode():
        inner = SyncGroup(name="inner", timeout=60.0)
        board = inner.buffer("board", (4 * N, N), torch.float32)
    assert not inner.token.is_inference() and inner.token is bench.sync.token

    def inside() -> Exchange:
        torch.manual_seed(3)
        return Exchange(inner, board)

    found = bench.train(inside(), bench.model())
    reference = bench.model()
    for make in (inside, bench.model):
        for run in (make(), torch.compile(make(), backend="aot_eager", fullgraph=True)):
            for _ in range(STEPS):
                bench.step += 1
                wanted = reference(bench.data()).detach()
                with torch.inference_mode():
                    seen = run(bench.data())
                if not torch.allclose(seen, wanted, atol=1e-5):
                    found.append(
                        f"step {bench.step}: inference is off by {(seen - wanted).abs().max().item():.3g}"
                    )
    check_health(inner)
    return found


def copies_and_moves(bench: Bench) -> list[str]:
    model = bench.model()
    twin = copy.deepcopy(model)
    assert twin.sync is bench.sync and twin.groups["also"][0] is bench.sync
    assert twin.board.sync is bench.sync and twin.first.weight is not model.first.weight
    found = bench.train(twin, model)
    found += bench.train(copy.deepcopy(twin), twin)
    wide, reference = copy.deepcopy(model).to(torch.float64).to("cpu"), bench.model(torch.float64)
    reference.load_state_dict(model.state_dict())
    wide.board = reference.board
    assert wide.sync is bench.sync
    found += bench.train(wide, reference, dtype=torch.float64)
    there_and_back = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    there_and_back.load_state_dict(model.state_dict())
    return found + bench.train(there_and_back, model)


def state(bench: Bench) -> list[str]:
    model = bench.model()
    found = bench.train(copy.deepcopy(model), model)
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(model.state_dict()) == names and not list(model.buffers())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = bench.model()
    assert not fresh.load_state_dict(torch.load(file), strict=True).missing_keys
    found += bench.train(fresh, model)
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        expect(TypeError, "cannot be pickled: .* Save the model's state_dict", save, model)
    return found


CASES: dict[str, Callable[[Bench], list[str]]] = {
    case.__name__: case
    for case in (
        *(ddp, ddp_compiled, fsdp2, fsdp2_compiled),
        *(checkpointing_reentrant, checkpointing, checkpointing_compiled),
        *(recompiles, several_functions, inference_mode, copies_and_moves, state),
    )
}


def check_wrappings(rank: int) -> dict[str, list[str]]:
    """All cases in one set of processes: starting them is what takes the time."""
    bench = Bench(rank)
    findings = {}
    for name, case in CASES.items():
        torch._dynamo.reset()
        findings[name] = case(bench)
        check_health(bench.sync)
    return findings


# ---- wrong on purpose


class Remembers(nn.Module):
    """What a graph would do that was recorded with the data of its first call."""

    def __init__(self, model: Exchange) -> None:
        super().__init__()
        self.model = model
        self.peer: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        board = self.model.board
        seen = board.get((self.model.sync.rank + 1) % RANKS, size=x.shape)
        self.peer = seen if self.peer is None else self.peer
        y = torch.tanh(self.model.first(x))
        board.put(y.detach())
        self.model.sync.barrier()
        self.model.sync.barrier()
        return self.model.second(self.model.sync.all_reduce(y * self.peer))  # type: ignore[no-any-return]


def check_wrong_wrappings(rank: int) -> dict[str, list[str]]:
    bench = Bench(rank)

    def detached(model: Exchange) -> nn.Module:
        model.groups = {"also": [_Detached(bench.sync)]}  # type: ignore[list-item]
        return model

    return {
        "remembers": bench.train(Remembers(bench.model()), bench.model()),
        "no gradient": bench.train(detached(bench.model()), bench.model()),
        "no averaging": bench.train(bench.model(), bench.model(), parallel=True),
    }


class _Detached:
    def __init__(self, sync: SyncGroup) -> None:
        self.sync = sync

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + (self.sync.all_reduce(x) - x).detach()


# ---- checkpointing on ranks that are not alike


class Around(Exchange):
    """A barrier before what the backward pass needs, a reduction behind it."""

    def forward(self, x: Tensor) -> Tensor:
        self.sync.barrier()
        y = torch.tanh(self.first(x))
        return y + self.sync.all_reduce(y.detach())


def _checkpointed(bench: Bench) -> dict[str, Callable[[], None]]:
    """A training step of the same model, as each of the ways to checkpoint runs it."""

    def step_of(model: Any) -> Callable[[], None]:
        return lambda: model(bench.data().requires_grad_()).sum().backward()

    model = Around(bench.sync, bench.boards[torch.float32])
    plain = Checkpointed(model, False)
    return {
        "eager": step_of(plain),
        "reentrant": step_of(Checkpointed(model, True)),
        "compiled": step_of(torch.compile(plain, backend="aot_eager", fullgraph=True)),
    }


def repetitions(rank: int) -> dict[str, list[str]]:
    """The ops of one step of each kind. Recomputation repeats what eager code passes on its way to what it needs."""
    logs = {}
    for mode, step in _checkpointed(Bench(rank)).items():
        step()  # compiles
        with executed_ops() as log:
            step()
        logs[mode] = [entry.name.removeprefix("gpusync.") for entry in log]
    return logs


def unequal(rank: int, other: str, timeout: float) -> str:
    """Rank 0 runs eagerly, its peers otherwise; then all go on. Returns the diagnosis."""
    bench = Bench(rank)
    steps = _checkpointed(bench)
    steps[other]()  # nobody compiles any more
    bench.sync.timeout = timeout
    try:
        for _ in range(2):
            steps["eager" if rank == 0 else other]()
    except RuntimeError:
        pass
    try:
        bench.sync.check()
    except SyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""

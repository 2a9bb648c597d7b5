"""Arguments for every public op, so that each can be checked by the same tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_gpusync import SyncGroup

SHAPE = (4, 6)
BUFFER = "samples"
CHANNEL = 1
_SIGNALS = 64  # more than a test consumes; a checker runs its op several times


def public_ops() -> list[str]:
    """Every overload without a leading underscore, by qualified name."""
    names = {
        f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("gpusync::") and not schema.name.startswith("gpusync::_")
    }
    return sorted(names)


def overload(name: str) -> Any:
    packet, _, suffix = name.removeprefix("gpusync::").partition(".")
    return getattr(getattr(torch.ops.gpusync, packet), suffix or "default")


def open_buffer(sync: SyncGroup) -> None:
    """Collective. What `samples` needs: a buffer, and signals in stock for `wait_signal`."""
    sync.buffer(BUFFER, SHAPE, torch.float32).put(torch.arange(24.0))
    for _ in range(_SIGNALS):
        sync.signal((sync.rank + 1) % sync.world_size, CHANNEL)
    sync.barrier()


def samples(name: str, sync: SyncGroup) -> list[tuple[Any, ...]]:
    """Argument lists of an op for one rank; each rank of the group makes the same calls with them."""
    after, before = (sync.rank + 1) % sync.world_size, (sync.rank - 1) % sync.world_size
    x = torch.arange(24.0).reshape(SHAPE) + 100 * sync.rank
    two = torch.tensor(2)
    n = sync.world_size
    arguments: dict[str, list[tuple[Any, ...]]] = {
        "gpusync::barrier": [(), (CHANNEL, False)],
        "gpusync::signal": [(after, CHANNEL)],
        "gpusync::wait_signal": [(before, CHANNEL)],
        "gpusync::pull_start": [(CHANNEL,)],
        "gpusync::pull_end": [(CHANNEL,), (CHANNEL, True)],
        "gpusync::push_epoch": [(CHANNEL,)],
        "gpusync::push_exit": [(CHANNEL,)],
        "gpusync::put": [(BUFFER, x), (BUFFER, x[:2].t(), -1, 12)],
        "gpusync::put.tensor_offset": [(BUFFER, x[:2].t(), -1, two)],
        "gpusync::get": [(BUFFER,), (BUFFER, after, (2, 3), 5, torch.float32), (BUFFER, -1, (0, 3))],
        "gpusync::get.tensor_offset": [(BUFFER, after, (2, 3), two), (BUFFER, -1, (1,), two, torch.float32)],
        "gpusync::all_reduce": [
            *((y,) for y in _layouts()),
            *((x.t().to(dtype), "max") for dtype in (torch.int64, torch.bfloat16)),
        ],
        "gpusync::all_gather": [
            (x.detach().requires_grad_(), n),
            *((y,) for y in _layouts() if y.dim() > 0),
            (torch.arange(3) % 2 == 1,),
        ],
        "gpusync::reduce_scatter": [
            (torch.cat([x] * n).requires_grad_(), "sum", n),
            (torch.arange(6.0 * n).reshape(3, 2 * n).t(), "avg"),
            (torch.arange(3 * n), "max"),
        ],
        "gpusync::broadcast": [(y, 0) for y in (*_layouts(), torch.arange(3, dtype=torch.uint8))],
        "gpusync::reduce": [*((y, n - 1) for y in _layouts()), (torch.arange(3), 0, "min")],
        "gpusync::all_to_all": [
            (torch.cat([x] * n).requires_grad_(),),
            (torch.arange(6.0 * n).reshape(3, 2 * n).t(),),
            (torch.arange(3 * n).to(torch.complex128),),
        ],
        "gpusync::all_reduce_rms_norm": [
            (x.detach().requires_grad_(), x + 1, torch.ones(6, requires_grad=True), 1e-5, 1.0),
            *((y, y.flip(0), y[0], 1e-5) for y in (torch.rand(3, 8).bfloat16(), torch.rand(8, 3).t())),
            (torch.ones(2, 0, 6), torch.ones(2, 0, 6), torch.ones(6).double(), 0.0),
        ],
        "gpusync::copy_to_ranks": [(y,) for y in _layouts()],
        "gpusync::reduce_from_ranks": [(y,) for y in _layouts()],
    }
    return [(sync.token, sync.name, *rest) for rest in arguments[name]]


def _layouts() -> list[Tensor]:
    """Tensors of many shapes and strides; the first ones require grad."""
    base = torch.arange(48.0).reshape(2, 4, 6)
    return [
        base[0].clone().requires_grad_(),
        base.transpose(0, 2).detach().requires_grad_(),
        base[:, ::2, 1::2],
        base[0, 0, 0],
        base[:, :0],
        base[:1, 0].expand(3, 6),
        torch.arange(48.0).reshape(1, 2, 4, 6).contiguous(memory_format=torch.channels_last),
    ]


def per_sample(
    sync: SyncGroup, check: Callable[[str, Any, tuple[Any, ...]], None], most: int | None = None
) -> None:
    """Runs a check on the samples of all ops (`most` of each), on every rank in step with the others."""
    open_buffer(sync)
    for name in public_ops():
        for arguments in samples(name, sync)[:most]:
            check(name, overload(name), arguments)
            sync.barrier()

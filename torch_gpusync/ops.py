"""Fake implementations of ``torch.ops.gpusync.*``. Schemas: csrc/ops.cpp; kernels: csrc/*_kernels.cpp; gradients:
gradients.py; under ``vmap`` and ``torch.cond``: transforms.py.

A fake depends on its arguments alone wherever it can, because graphs outlive groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torch_gpusync import _library

_library.load()

ops = torch.ops.gpusync

REDUCE_OPS = ("sum", "max", "min", "avg")
ALGOS = ("auto", "pull_one_shot", "pull_two_shot", "push_one_shot")
REDUCIBLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)

# (group name, buffer name) -> (shape, dtype), for a `get` that leaves them out.
buffer_meta: dict[tuple[str, str], tuple[torch.Size, torch.dtype]] = {}
# Group name -> world size, for a collective that leaves it out.
world_sizes: dict[str, int] = {}
# Group name -> what all_reduce_rms_norm takes into one kernel at most, by dtype: bytes, rows. Groups on the CPU have none.
norm_limits: dict[str, dict[torch.dtype, tuple[int, int]]] = {}

lib = torch.library.Library("gpusync", "FRAGMENT")
lib.define("copy_to_ranks(Tensor(a!) token, str group_name, Tensor x) -> Tensor")
lib.define("reduce_from_ranks(Tensor(a!) token, str group_name, Tensor x) -> Tensor")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of every op that returns nothing and takes no tensor besides the token."""


def check_device(token: Tensor, x: Tensor) -> None:
    """Also what stops a meta tensor, whose 'kernels' these fakes are, from being taken for data."""
    torch._check(
        token.device.type == x.device.type,
        lambda: (
            f"gpusync: got a tensor on '{x.device}' and the token of a group on '{token.device}': move one to "
            "the other's device"
        ),
    )


_RETURN_NOTHING = ("barrier", "signal", "wait_signal", "pull_start", "pull_end", "push_exit", "_nothing")
BUFFER_OPS = ("put", "put.tensor_offset", "get", "get.tensor_offset")
ELEMENTWISE = ("all_reduce", "_all_reduce", "copy_to_ranks", "reduce_from_ranks", "broadcast", "reduce")
ALONG_DIMENSION_0 = ("all_gather", "reduce_scatter", "all_to_all")
COLLECTIVES = (*ELEMENTWISE, *ALONG_DIMENSION_0, "all_reduce_rms_norm")
ALL_OPS = (*_RETURN_NOTHING, "push_epoch", *BUFFER_OPS, *COLLECTIVES, "_push_rms_norm")
WITH_GRADIENT = tuple(name for name in COLLECTIVES if name != "_all_reduce")

for _name in _RETURN_NOTHING:
    torch.library.register_fake(f"gpusync::{_name}", _nothing, lib=lib)


@torch.library.register_fake("gpusync::put.tensor_offset", lib=lib)
@torch.library.register_fake("gpusync::put", lib=lib)
def _put(
    token: Tensor, group_name: str, buffer: str, x: Tensor, rank: int = -1, offset: int | Tensor = 0
) -> None:
    check_device(token, x)


@torch.library.register_fake("gpusync::push_epoch", lib=lib)
def _push_epoch(token: Tensor, group_name: str, channel: int = 0) -> Tensor:
    return token.new_empty((), dtype=torch.int32)


@torch.library.register_fake("gpusync::get.tensor_offset", lib=lib)
@torch.library.register_fake("gpusync::get", lib=lib)
def _get(
    token: Tensor,
    group_name: str,
    buffer: str,
    rank: int = -1,
    size: Sequence[int] | None = None,
    offset: int | Tensor = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if size is None or dtype is None:
        if is_compiling():
            # A graph keeps what is found here, and the buffer of this name may be another one when it runs.
            raise RuntimeError(
                f"gpusync: get from buffer '{buffer}' in a compiled function: pass size and dtype, as "
                "SymmetricBuffer.get does, for compiled code may outlive the buffer"
            )
        if (group_name, buffer) not in buffer_meta:
            raise RuntimeError(
                f"gpusync: group '{group_name}' has no buffer '{buffer}' here: make it before, or pass size and dtype"
            )
        known_size, known_dtype = buffer_meta[group_name, buffer]
        size = known_size if size is None else size
        dtype = known_dtype if dtype is None else dtype
    return token.new_empty(size, dtype=dtype)


@torch.library.register_fake("gpusync::all_reduce", lib=lib)
@torch.library.register_fake("gpusync::_all_reduce", lib=lib)
def _all_reduce(
    token: Tensor, group_name: str, x: Tensor, reduce_op: str = "sum", algo: str = "auto"
) -> Tensor:
    torch._check(
        reduce_op in REDUCE_OPS, lambda: f"gpusync: unknown reduce_op '{reduce_op}': use one of {REDUCE_OPS}"
    )
    torch._check(algo in ALGOS, lambda: f"gpusync: unknown algo '{algo}': use one of {ALGOS}")
    torch._check(
        x.dtype in REDUCIBLE_DTYPES, lambda: f"gpusync: all_reduce does not take {x.dtype}: convert x"
    )
    check_device(token, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("gpusync::copy_to_ranks", lib=lib)
@torch.library.register_fake("gpusync::reduce_from_ranks", lib=lib)
def _like(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    check_device(token, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)

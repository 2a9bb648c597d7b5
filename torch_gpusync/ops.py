"""Fake implementations and gradients of ``torch.ops.gpusync.*``. Schemas: csrc/ops.cpp; kernels: csrc/*_kernels.cpp.

A fake depends on its arguments alone wherever it can, because graphs outlive groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_gpusync import _library

_library.load()

ops = torch.ops.gpusync

REDUCE_OPS = ("sum", "max", "min", "avg")
ALGOS = ("auto", "pull_one_shot", "pull_two_shot", "push_one_shot")
REDUCIBLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)

# (group name, buffer name) -> (shape, dtype), for a `get` that leaves them out.
buffer_meta: dict[tuple[str, str], tuple[torch.Size, torch.dtype]] = {}

_lib = torch.library.Library("gpusync", "FRAGMENT")
_lib.define("copy_to_ranks(Tensor(a!) token, str group_name, Tensor x) -> Tensor")
_lib.define("reduce_from_ranks(Tensor(a!) token, str group_name, Tensor x) -> Tensor")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of every op that returns nothing and takes no tensor besides the token."""


def _check_device(token: Tensor, x: Tensor) -> None:
    """Also what stops a meta tensor, whose 'kernels' these fakes are, from being taken for data."""
    torch._check(
        token.device.type == x.device.type,
        lambda: (
            f"gpusync: got a tensor on '{x.device}' and the token of a group on '{token.device}': move one to "
            "the other's device"
        ),
    )


_RETURN_NOTHING = ("barrier", "signal", "wait_signal", "pull_start", "pull_end", "push_exit", "_nothing")

for _name in _RETURN_NOTHING:
    torch.library.register_fake(f"gpusync::{_name}", _nothing, lib=_lib)


@torch.library.register_fake("gpusync::put.tensor_offset", lib=_lib)
@torch.library.register_fake("gpusync::put", lib=_lib)
def _put(
    token: Tensor, group_name: str, buffer: str, x: Tensor, rank: int = -1, offset: int | Tensor = 0
) -> None:
    _check_device(token, x)


@torch.library.register_fake("gpusync::push_epoch", lib=_lib)
def _push_epoch(token: Tensor, group_name: str, channel: int = 0) -> Tensor:
    return token.new_empty((), dtype=torch.int32)


@torch.library.register_fake("gpusync::get.tensor_offset", lib=_lib)
@torch.library.register_fake("gpusync::get", lib=_lib)
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
        if (group_name, buffer) not in buffer_meta:
            raise RuntimeError(
                f"gpusync: group '{group_name}' has no buffer '{buffer}' here: make it before, or pass size and dtype"
            )
        known_size, known_dtype = buffer_meta[group_name, buffer]
        size = known_size if size is None else size
        dtype = known_dtype if dtype is None else dtype
    return token.new_empty(size, dtype=dtype)


@torch.library.register_fake("gpusync::all_reduce", lib=_lib)
@torch.library.register_fake("gpusync::_all_reduce", lib=_lib)
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
    _check_device(token, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("gpusync::copy_to_ranks", lib=_lib)
@torch.library.register_fake("gpusync::reduce_from_ranks", lib=_lib)
def _like(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    _check_device(token, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Gradients. `torch.library.register_autograd` refuses ops that mutate an argument; a Python kernel on the
# Autograd key does not, and is traced through by AOTAutograd like any other.


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, group_name: str, reduce_op: str, algo: str) -> Tensor:
        ctx.token, ctx.group_name, ctx.reduce_op, ctx.algo = token, group_name, reduce_op, algo
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = ops.all_reduce.default(token, group_name, x, reduce_op, algo)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.reduce_op not in ("sum", "avg"):
            raise RuntimeError(
                f"gpusync: all_reduce has no gradient for reduce_op='{ctx.reduce_op}': detach its input"
            )
        return (
            ops.all_reduce.default(ctx.token, ctx.group_name, grad, ctx.reduce_op, ctx.algo),
            None,
            None,
            None,
            None,
        )


def _all_reduce_autograd(
    keys: torch._C.DispatchKeySet,
    token: Tensor,
    group_name: str,
    x: Tensor,
    reduce_op: str = "sum",
    algo: str = "auto",
) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _AllReduce.apply(x, token, group_name, reduce_op, algo)
        return result
    below = keys & torch._C._after_autograd_keyset  # half a microsecond less than a guard
    return ops.all_reduce.default.redispatch(  # type: ignore[no-any-return]
        below, token, group_name, x, reduce_op, algo
    )


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, group_name: str) -> Tensor:
        ctx.token, ctx.group_name = token, group_name
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ops.all_reduce.default(ctx.token, ctx.group_name, grad), None, None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, group_name: str) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = ops.all_reduce.default(token, group_name, x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


def _copy(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _copy_autograd(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    result: Tensor = _CopyToRanks.apply(x, token, group_name)
    return result


def _reduce(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    result: Tensor = ops.all_reduce.default(token, group_name, x)
    return result


def _reduce_autograd(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    result: Tensor = _ReduceFromRanks.apply(x, token, group_name)
    return result


_lib.impl("all_reduce", _all_reduce_autograd, "Autograd", with_keyset=True)
_lib.impl("copy_to_ranks", _copy, "CompositeExplicitAutograd")
_lib.impl("copy_to_ranks", _copy_autograd, "Autograd")
_lib.impl("reduce_from_ranks", _reduce, "CompositeExplicitAutograd")
_lib.impl("reduce_from_ranks", _reduce_autograd, "Autograd")

# The others have no gradient: they skip autograd, which would otherwise complain about the mutated token.
for _name in (
    *_RETURN_NOTHING,
    "_all_reduce",
    "put",
    "put.tensor_offset",
    "push_epoch",
    "get",
    "get.tensor_offset",
):
    _lib.impl(_name, torch.library.fallthrough_kernel, "Autograd")

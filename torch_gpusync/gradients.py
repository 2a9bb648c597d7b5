"""Gradients of ``torch.ops.gpusync.*``, for backward, for forward mode, and under the transforms of ``torch.func``.

`torch.library.register_autograd` refuses ops that mutate an argument; a Python kernel on the Autograd key does
not, and is traced through by AOTAutograd like any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from torch_gpusync.ops import ALL_OPS, WITH_GRADIENT, lib, ops

_all_reduce = ops.all_reduce.default

Modes = tuple[bool, bool] | None  # are backward and forward mode on where the op was called?


def wants_gradient(x: Tensor) -> bool:
    """May a gradient or a tangent of what is made of x be asked for?

    ``requires_grad`` does not show tangents, nor what lies inside the tensors of ``torch.func``'s transforms:
    where these are at work the answer is yes.
    """
    return (
        (x.requires_grad and torch.is_grad_enabled())
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def apply(function: Any, *arguments: Any) -> Tensor:
    if not torch._C._are_functorch_transforms_active():
        return function.apply(None, *arguments)  # type: ignore[no-any-return]
    from torch._functorch.utils import enable_single_level_autograd_function

    modes = (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
    with enable_single_level_autograd_function():
        return function.apply(modes, *arguments)  # type: ignore[no-any-return]


@contextmanager
def below_autograd(modes: tuple[bool, bool] | None) -> Iterator[None]:
    """For the forward pass, which autograd runs with all of it switched off: the levels below want it as it was."""
    with torch._C._AutoDispatchBelowAutograd():
        if modes is None:
            yield
            return
        with torch.set_grad_enabled(modes[0]), forward_ad._set_fwd_grad_enabled(modes[1]):
            yield


class OfRanks(_SingleLevelFunction):
    """Base: ``(modes, x, token, group_name, ...) -> Tensor``.

    Under ``torch.func`` an op's kernel on the Autograd key runs inside one level of the transforms, and the op that it
    calls goes on to the next: an ordinary ``autograd.Function`` would go through all levels anew. (It would also bind
    its arguments by signature, which takes longer than a small all_reduce.)
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.token, ctx.group_name, *ctx.rest = inputs


class _AllReduce(OfRanks):
    @staticmethod
    def forward(modes: Modes, x: Tensor, token: Tensor, group_name: str, reduce_op: str, algo: str) -> Tensor:
        with below_autograd(modes):
            result: Tensor = _all_reduce(token, group_name, x, reduce_op, algo)
        return result

    @staticmethod
    def _linear(ctx: Any, change: Tensor) -> Tensor:
        reduce_op, algo = ctx.rest
        if reduce_op not in ("sum", "avg"):
            raise RuntimeError(
                f"gpusync: all_reduce has no gradient for reduce_op='{reduce_op}': detach its input"
            )
        result: Tensor = _all_reduce(ctx.token, ctx.group_name, change, reduce_op, algo)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, _AllReduce._linear(ctx, grad), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, _modes: None, tangent: Tensor, *_: None) -> Tensor:
        return _AllReduce._linear(ctx, tangent)


class _CopyToRanks(OfRanks):
    @staticmethod
    def forward(modes: Modes, x: Tensor, token: Tensor, group_name: str) -> Tensor:
        if modes is None:
            return x.clone(memory_format=torch.contiguous_format)
        with below_autograd(modes):  # a clone has another gradient at the levels below
            result: Tensor = ops.copy_to_ranks.default(token, group_name, x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not all_reduce, which is the same with another gradient: f and g are each other's, however often.
        return None, ops.reduce_from_ranks.default(ctx.token, ctx.group_name, grad), None, None

    @staticmethod
    def jvp(ctx: Any, _modes: None, tangent: Tensor, *_: None) -> Tensor:
        result: Tensor = ops.copy_to_ranks.default(ctx.token, ctx.group_name, tangent)
        return result


class _ReduceFromRanks(OfRanks):
    @staticmethod
    def forward(modes: Modes, x: Tensor, token: Tensor, group_name: str) -> Tensor:
        op = _all_reduce if modes is None else ops.reduce_from_ranks.default
        with below_autograd(modes):
            result: Tensor = op(token, group_name, x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if wants_gradient(grad):
            grad = ops.copy_to_ranks.default(ctx.token, ctx.group_name, grad)
        return None, grad, None, None

    @staticmethod
    def jvp(ctx: Any, _modes: None, tangent: Tensor, *_: None) -> Tensor:
        result: Tensor = ops.reduce_from_ranks.default(ctx.token, ctx.group_name, tangent)
        return result


def _all_reduce_autograd(
    keys: torch._C.DispatchKeySet,
    token: Tensor,
    group_name: str,
    x: Tensor,
    reduce_op: str = "sum",
    algo: str = "auto",
) -> Tensor:
    # Where a compiler traces (on the Python key) nothing but autograd itself knows of tangents.
    if wants_gradient(x) or keys.has(torch._C.DispatchKey.Python):
        return apply(_AllReduce, x, token, group_name, reduce_op, algo)
    below = keys & torch._C._after_autograd_keyset  # half a microsecond less than a guard
    return _all_reduce.redispatch(below, token, group_name, x, reduce_op, algo)  # type: ignore[no-any-return]


def _copy(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _copy_autograd(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    return apply(_CopyToRanks, x, token, group_name)


def _reduce(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    result: Tensor = _all_reduce(token, group_name, x)
    return result


def _reduce_autograd(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    return apply(_ReduceFromRanks, x, token, group_name)


lib.impl("all_reduce", _all_reduce_autograd, "Autograd", with_keyset=True)
lib.impl("copy_to_ranks", _copy, "CompositeExplicitAutograd")
lib.impl("copy_to_ranks", _copy_autograd, "Autograd")
lib.impl("reduce_from_ranks", _reduce, "CompositeExplicitAutograd")
lib.impl("reduce_from_ranks", _reduce_autograd, "Autograd")

# The others have no gradient: they skip autograd, which would otherwise complain about the mutated token.
for _name in ALL_OPS:
    if _name not in WITH_GRADIENT:
        lib.impl(_name, torch.library.fallthrough_kernel, "Autograd")

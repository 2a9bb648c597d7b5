"""Fakes and gradients of the collectives in which ranks read one another's input: ``all_gather``, ``reduce_scatter``,
``broadcast``, ``reduce``, ``all_to_all``.

Nothing here asks which rank it runs on: a graph that was traced on one rank may come out of a compiler's cache on another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_gpusync.gradients import Modes, OfRanks, apply, below_autograd, wants_gradient
from torch_gpusync.ops import REDUCE_OPS, REDUCIBLE_DTYPES, check_device, lib, ops, world_sizes


def _ranks(group_name: str, world_size: int | None) -> int:
    if world_size is None:
        if group_name not in world_sizes:
            raise RuntimeError(
                f"gpusync: there is no group '{group_name}' here: make it before, or pass world_size"
            )
        return world_sizes[group_name]
    return world_size


def _check_reduction(op: str, x: Tensor, reduce_op: str) -> None:
    torch._check(
        reduce_op in REDUCE_OPS, lambda: f"gpusync: unknown reduce_op '{reduce_op}': use one of {REDUCE_OPS}"
    )
    torch._check(x.dtype in REDUCIBLE_DTYPES, lambda: f"gpusync: {op} does not take {x.dtype}: convert x")


def _check_dimension(op: str, x: Tensor, parts: int = 1) -> None:
    torch._check(
        x.dim() > 0, lambda: f"gpusync: {op} works along dimension 0, and x has none: pass x.reshape(1)"
    )
    torch._check(
        x.shape[0] % parts == 0,
        lambda: (
            f"gpusync: {op} splits dimension 0, here of {x.shape[0]}, into {parts} equal parts: pad x to a "
            "multiple of that"
        ),
    )


@torch.library.register_fake("gpusync::all_gather", lib=lib)
def _all_gather(token: Tensor, group_name: str, x: Tensor, world_size: int | None = None) -> Tensor:
    check_device(token, x)
    _check_dimension("all_gather", x)
    return x.new_empty((x.shape[0] * _ranks(group_name, world_size), *x.shape[1:]))


@torch.library.register_fake("gpusync::reduce_scatter", lib=lib)
def _reduce_scatter(
    token: Tensor, group_name: str, x: Tensor, reduce_op: str = "sum", world_size: int | None = None
) -> Tensor:
    check_device(token, x)
    _check_reduction("reduce_scatter", x, reduce_op)
    parts = _ranks(group_name, world_size)
    _check_dimension("reduce_scatter", x, parts)
    return x.new_empty((x.shape[0] // parts, *x.shape[1:]))


@torch.library.register_fake("gpusync::broadcast", lib=lib)
def _broadcast(token: Tensor, group_name: str, x: Tensor, src: int) -> Tensor:
    check_device(token, x)
    return x.new_empty(x.shape)


@torch.library.register_fake("gpusync::reduce", lib=lib)
def _reduce(token: Tensor, group_name: str, x: Tensor, dst: int, reduce_op: str = "sum") -> Tensor:
    check_device(token, x)
    _check_reduction("reduce", x, reduce_op)
    return x.new_empty(x.shape)


@torch.library.register_fake("gpusync::all_to_all", lib=lib)
def _all_to_all(token: Tensor, group_name: str, x: Tensor) -> Tensor:
    check_device(token, x)
    _check_dimension("all_to_all", x)
    return x.new_empty(x.shape)


class _Linear(OfRanks):
    """An op that is linear in x: its tangent is the op itself, its gradient another one of them."""

    @staticmethod
    def forward(
        modes: Modes, x: Tensor, token: Tensor, group_name: str, op: Any, _: Any, *arguments: Any
    ) -> Tensor:
        with below_autograd(modes):
            result: Tensor = op(token, group_name, x, *arguments)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, transposed, *arguments = ctx.rest
        gradient: Tensor = transposed(ctx.token, ctx.group_name, grad, *arguments)
        return None, gradient, None, None, *(None for _ in ctx.rest)

    @staticmethod
    def jvp(ctx: Any, _modes: None, tangent: Tensor, *_: None) -> Tensor:
        op, _transposed, *arguments = ctx.rest
        _check_linear(op, arguments)
        result: Tensor = op(ctx.token, ctx.group_name, tangent, *arguments)
        return result


def _check_linear(op: Any, arguments: Sequence[Any]) -> None:
    for reduce_op in arguments:
        if reduce_op in ("max", "min"):
            name = op._schema.name.removeprefix("gpusync::")
            raise RuntimeError(
                f"gpusync: {name} has no gradient for reduce_op='{reduce_op}': detach its input"
            )


def _differentiable(op: Any, transposed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The op's kernel for the Autograd key. ``transposed(token, group_name, grad, *arguments)`` is the gradient."""

    def kernel(
        keys: torch._C.DispatchKeySet, token: Tensor, group_name: str, x: Tensor, *arguments: Any
    ) -> Tensor:
        # Where a compiler traces (on the Python key) nothing but autograd itself knows of tangents.
        if wants_gradient(x) or keys.has(torch._C.DispatchKey.Python):
            return apply(_Linear, x, token, group_name, op, transposed, *arguments)
        below = keys & torch._C._after_autograd_keyset
        return op.redispatch(below, token, group_name, x, *arguments)  # type: ignore[no-any-return]

    return kernel


def _of_all_gather(token: Tensor, group_name: str, grad: Tensor, world_size: int | None = None) -> Tensor:
    result: Tensor = ops.reduce_scatter.default(token, group_name, grad, "sum", world_size)
    return result


def _of_reduce_scatter(
    token: Tensor, group_name: str, grad: Tensor, reduce_op: str = "sum", world_size: int | None = None
) -> Tensor:
    _check_linear(ops.reduce_scatter.default, [reduce_op])
    if reduce_op == "avg":
        grad = grad / _ranks(group_name, world_size)
    result: Tensor = ops.all_gather.default(token, group_name, grad, world_size)
    return result


def _of_broadcast(token: Tensor, group_name: str, grad: Tensor, src: int) -> Tensor:
    result: Tensor = ops.reduce.default(token, group_name, grad, src)
    return result


def _of_reduce(token: Tensor, group_name: str, grad: Tensor, dst: int, reduce_op: str = "sum") -> Tensor:
    _check_linear(ops.reduce.default, [reduce_op])
    if reduce_op == "avg":
        grad = grad / _ranks(group_name, None)
    result: Tensor = ops.broadcast.default(token, group_name, grad, dst)
    return result


def _of_all_to_all(token: Tensor, group_name: str, grad: Tensor) -> Tensor:
    result: Tensor = ops.all_to_all.default(token, group_name, grad)
    return result


for _op, _transposed in (
    (ops.all_gather.default, _of_all_gather),
    (ops.reduce_scatter.default, _of_reduce_scatter),
    (ops.broadcast.default, _of_broadcast),
    (ops.reduce.default, _of_reduce),
    (ops.all_to_all.default, _of_all_to_all),
):
    lib.impl(_op._schema.name, _differentiable(_op, _transposed), "Autograd", with_keyset=True)

"""``all_reduce_rms_norm``: on a GPU one kernel where that fits, elsewhere an all_reduce and ordinary torch ops.

Gradients, tangents and batches of weights are those of the steps: they always run as such.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_gpusync.errors import SyncError
from torch_gpusync.gradients import wants_gradient
from torch_gpusync.ops import _all_reduce as _fake_all_reduce
from torch_gpusync.ops import lib, norm_limits, ops

Pair = tuple[Tensor, Tensor]
Limits = dict[torch.dtype, tuple[int, int]]  # see ops.norm_limits

_op = ops.all_reduce_rms_norm.default
_in_one_kernel = ops._push_rms_norm.default


def steps(
    all_reduce: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_bias: float,
) -> Pair:
    """What the op does, with any kind of all_reduce. ``weight`` may have dimensions before the last, too."""
    residual_out = residual.contiguous() + all_reduce(x)
    wide = residual_out.float() if x.dtype.itemsize == 2 else residual_out
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    norm = wide * scale * (weight.to(wide.dtype) + weight_bias)
    return norm.to(x.dtype), residual_out


def check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raises SyncError for arguments that do not fit together."""
    if not x.dtype.is_floating_point or (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise SyncError(
            "gpusync: all_reduce_rms_norm takes a floating-point x and a residual of the same shape and dtype, not "
            f"{x.dtype} {tuple(x.shape)} and {residual.dtype} {tuple(residual.shape)}"
        )
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise SyncError(
            f"gpusync: all_reduce_rms_norm takes a weight for each of x's last dimension, not {tuple(weight.shape)} "
            f"for {tuple(x.shape)}"
        )
    if not x.device == residual.device == weight.device:
        raise SyncError(
            f"gpusync: all_reduce_rms_norm takes tensors on one device, not x on '{x.device}', residual on "
            f"'{residual.device}' and weight on '{weight.device}'"
        )


def fits(x: Tensor, weight: Tensor, limits: Limits) -> bool:
    """Is there one kernel for it? Where a compiler does not know the size there is none.

    A program that is exported takes the op for sizes that may vary: the op chooses when it runs, and a guard would bind the
    program to one side of this group's limits.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_true, statically_known_true  # costs a second

    if weight.dtype != x.dtype or x.dtype not in limits:
        return False
    is_true = statically_known_true if torch.compiler._is_exporting_flag else guard_or_true
    most_bytes, most_rows = limits[x.dtype]
    columns, item = x.shape[-1], x.dtype.itemsize
    return not (
        is_true(columns * item % 8 != 0)  # the kernel moves parcels of so many bytes, of one row each
        or is_true(x.numel() == 0)
        or is_true(x.numel() * item > most_bytes)
        or is_true(x.numel() > most_rows * columns)
    )


@torch.library.register_fake("gpusync::all_reduce_rms_norm", lib=lib)
def _fake(
    token: Tensor,
    group_name: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_bias: float = 0.0,
) -> Pair:
    check(x, residual, weight)
    residual_out = _fake_all_reduce(token, group_name, x)
    return torch.empty_like(residual_out), residual_out


def _kernel(
    token: Tensor,
    group_name: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_bias: float = 0.0,
) -> Pair:
    """Chooses now, not when it is compiled: packages that hold the op are loaded where groups have other limits."""
    check(x, residual, weight)
    if fits(x, weight, norm_limits.get(group_name, {})):
        pair: Pair = _in_one_kernel(token, group_name, x, residual, weight, eps, weight_bias)
        return pair
    return steps(partial(ops._all_reduce.default, token, group_name), x, residual, weight, eps, weight_bias)


def _has_tangent(x: Tensor) -> bool:
    """Where a compiler traces, nothing but the tensor itself knows. The question must not get into the graph."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        return forward_ad.unpack_dual(x, level=0).tangent is not None


def _autograd(
    keys: torch._C.DispatchKeySet,
    token: Tensor,
    group_name: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_bias: float = 0.0,
) -> Pair:
    tensors = (x, residual, weight)
    is_traced = keys.has(torch._C.DispatchKey.Python)
    if any(wants_gradient(t) or (is_traced and _has_tangent(t)) for t in tensors):
        check(*tensors)
        all_reduce = partial(ops.all_reduce.default, token, group_name)
        return steps(all_reduce, *tensors, eps, weight_bias)
    below = keys & torch._C._after_autograd_keyset
    return _op.redispatch(below, token, group_name, *tensors, eps, weight_bias)  # type: ignore[no-any-return]


def _batch(
    info: Any,
    in_dims: tuple[int | None, ...],
    token: Tensor,
    group_name: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_bias: float = 0.0,
) -> tuple[Pair, tuple[int, int]]:
    """One call for the whole batch: a batch of weights is what the kernel does not know."""

    def in_front(t: Tensor, dim: int | None) -> Tensor:
        return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

    def one_of(t: Tensor) -> Tensor:
        return t.new_empty(t.shape[1:])  # a batch may have none

    x, residual = in_front(x, in_dims[2]), in_front(residual, in_dims[3])
    if in_dims[4] is None:
        check(one_of(x), one_of(residual), weight)
        return _op(token, group_name, x, residual, weight, eps, weight_bias), (0, 0)
    weight = weight.movedim(in_dims[4], 0)
    check(one_of(x), one_of(residual), one_of(weight))
    weight = weight.view(info.batch_size, *(1,) * (x.dim() - 2), weight.shape[-1])
    all_reduce = partial(ops.all_reduce.default, token, group_name)
    return steps(all_reduce, x, residual, weight, eps, weight_bias), (0, 0)


lib.impl("all_reduce_rms_norm", _kernel, "CompositeExplicitAutograd")
lib.impl("all_reduce_rms_norm", _autograd, "Autograd", with_keyset=True)
torch.library.register_vmap("gpusync::all_reduce_rms_norm", _batch, lib=lib)

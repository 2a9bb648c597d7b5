"""The collectives of a group, as methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from torch_gpusync import exchange, rms_norm  # noqa: F401  (registers fakes and gradients)
from torch_gpusync.gradients import wants_gradient
from torch_gpusync.ops import ops

# Looked up once: through torch.ops it would be a tenth of a call.
_all_reduce = ops.all_reduce.default
_all_reduce_without_grad = ops._all_reduce.default
_all_gather = ops.all_gather.default
_reduce_scatter = ops.reduce_scatter.default
_broadcast = ops.broadcast.default
_reduce = ops.reduce.default
_all_reduce_rms_norm = ops.all_reduce_rms_norm.default
_all_to_all = ops.all_to_all.default


class Collectives:
    """Every rank makes the same calls in the same order. Nothing else is needed before or after: data is staged in memory of
    the group's own, and the result is complete when the call returns (on a GPU: in stream order).

    All of them raise :class:`SyncError` for an x that they cannot take, on all ranks alike, and
    :class:`SyncTimeoutError` or :class:`SyncMismatchError`: see the classes. A call with zero elements, on all ranks, does
    nothing.
    """

    world_size: int
    _norm_limits: rms_norm.Limits
    _call: Callable[..., Any]  # an op, with the token and the name of whoever has these methods

    def all_reduce(self, x: torch.Tensor, reduce_op: str = "sum", algo: str = "auto") -> torch.Tensor:
        """Reduce ``x`` over the ranks, out of place; every rank gets the same bits (of a NaN, the same up to its payload).

        Args:
            x: float32, float64, float16, bfloat16, int32 or int64, any shape and strides, the same on all
                ranks.
            reduce_op: ``sum``, ``max``, ``min`` or, for floating point, ``avg`` (the sum times 1/world_size),
                in rank order; the 16-bit types are reduced in float32 and rounded once.
            algo: ``pull_one_shot`` (stage, meet, read all), ``pull_two_shot`` (each rank reduces its share),
                ``push_one_shot`` (write to all), or ``auto`` by size. All give the same bits.

        Returns:
            A contiguous tensor of x's shape and dtype. Gradient (sum and avg): all_reduce of the gradients
            with the same reduce_op.

        Raises:
            SyncError: unknown dtype, reduce_op or algo. SyncTimeoutError, SyncMismatchError: see the classes.
        """
        needs_grad = is_compiling() or wants_gradient(x)
        return self._call(  # type: ignore[no-any-return]
            _all_reduce if needs_grad else _all_reduce_without_grad, x, reduce_op, algo
        )

    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_bias: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What stands between the halves of a tensor-parallel block: ``residual + all_reduce(x)``, and its RMS norm.

        The norm (Zhang and Sennrich, arXiv:1910.07467) is taken over the last dimension, in float32 for the 16-bit types,
        and rounded once.

        On GPUs all of it is one kernel where no gradient is wanted (``torch.no_grad``, ``torch.inference_mode``, or
        nothing requires one), x and weight are both float32, float16 or bfloat16, a row ``x[..., :]`` is a multiple of
        8 bytes, x is no larger than what all_reduce pushes in one launch, and has no more rows than the group's launches
        may have blocks (128, fewer where ranks share a GPU). Elsewhere it is an all_reduce and ordinary torch ops, of
        which Inductor makes one kernel; so it is in compiled code where the size is known only from data.
        Both give the same bits of ``residual_out``; of ``norm_out`` the last bit may differ.

        Args:
            x: this rank's summand, floating point, shape ``(..., d)``, any strides.
            residual: the same on all ranks, x's shape and dtype.
            weight: shape ``(d,)``; ``weight + weight_bias`` is what the norm is multiplied by (some models store the
                difference to one).
            eps: added to the mean square. A compiled function is compiled anew for another one.
            weight_bias: likewise a constant.

        Returns:
            ``(norm_out, residual_out)``, contiguous, both of x's shape and dtype. Gradients as those of the steps:
            all_reduce's are summed over the ranks. All ranks want one, or none does.

        Raises:
            SyncError: shapes, dtypes or devices do not fit.
        """
        rms_norm.check(x, residual, weight)
        # Transforms and forward mode do not show here. The op knows of them.
        needs_grad = torch.is_grad_enabled() and (
            x.requires_grad or residual.requires_grad or weight.requires_grad
        )
        if not needs_grad and rms_norm.fits(x, weight, self._norm_limits):
            return self._call(_all_reduce_rms_norm, x, residual, weight, eps, weight_bias)  # type: ignore[no-any-return]
        # Not the op, though it runs the same steps: here a compiler sees them, and fuses those behind the all_reduce.
        return rms_norm.steps(self.all_reduce, x, residual, weight, eps, weight_bias)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, joined along dimension 0 in rank order.

        Args:
            x: any dtype, at least one dimension, the same shape on all ranks.

        Returns:
            Of shape ``(world_size * x.shape[0], *x.shape[1:])``. Gradient: reduce_scatter of the gradients (not of
            complex x, which cannot be reduced; nor has broadcast one then).
        """
        return self._call(_all_gather, x, self.world_size)  # type: ignore[no-any-return]

    def reduce_scatter(self, x: torch.Tensor, reduce_op: str = "sum") -> torch.Tensor:
        """My part, along dimension 0, of the reduction over the ranks: the same bits that all_reduce has there.

        Args:
            x: dtypes as for :meth:`all_reduce`; ``x.shape[0]`` is a multiple of the world size.
            reduce_op: as for :meth:`all_reduce`.

        Returns:
            Of shape ``(x.shape[0] // world_size, *x.shape[1:])``. Gradient (sum and avg): all_gather of the gradients.
        """
        return self._call(_reduce_scatter, x, reduce_op, self.world_size)  # type: ignore[no-any-return]

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Rank ``src``'s ``x``.

        Args:
            x: any dtype and shape, the same on all ranks; its values count on rank ``src`` alone.

        Returns:
            A contiguous tensor of x's shape. Gradient: at ``src`` the sum of all ranks' gradients, elsewhere zero.
        """
        return self._call(_broadcast, x, src)  # type: ignore[no-any-return]

    def reduce(self, x: torch.Tensor, dst: int, reduce_op: str = "sum") -> torch.Tensor:
        """The reduction over the ranks at rank ``dst``, zeros elsewhere.

        Args:
            x, reduce_op: as for :meth:`all_reduce`.

        Returns:
            A contiguous tensor of x's shape. Gradient (sum and avg): broadcast of the gradient at ``dst``.
        """
        return self._call(_reduce, x, dst, reduce_op)  # type: ignore[no-any-return]

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Part ``r`` of ``x``, along dimension 0, goes to rank r; what comes from rank r becomes part ``r`` of the result.

        Args:
            x: any dtype; ``x.shape[0]`` is a multiple of the world size, and all parts are equal.

        Returns:
            A contiguous tensor of x's shape. Gradient: all_to_all of the gradients.
        """
        return self._call(_all_to_all, x)  # type: ignore[no-any-return]

"""What the ops do under ``torch.vmap``, and inside a ``torch.cond`` that torch cannot compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_gpusync.ops import ALL_OPS, ALONG_DIMENSION_0, BUFFER_OPS, ELEMENTWISE, lib, ops

# An op that no batched tensor reaches (a barrier never meets one) runs once for the batch, with no rule.


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(ops, packet), overload or "default")


def _whole_batch(name: str) -> Callable[..., tuple[Tensor, int]]:
    """A reduction over ranks takes each element apart: one call reduces the whole batch."""
    op = _overload(name)

    def rule(
        info: Any, in_dims: tuple[int | None, ...], token: Tensor, group_name: str, x: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        return op(token, group_name, x.movedim(in_dims[2] or 0, 0), *rest), 0

    return rule


def _batch_behind(name: str) -> Callable[..., tuple[Tensor, int]]:
    """Ranks exchange rows: one call exchanges each row of the whole batch."""
    op = _overload(name)

    def rule(
        info: Any, in_dims: tuple[int | None, ...], token: Tensor, group_name: str, x: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        torch._check(
            x.dim() > 1, lambda: f"gpusync: {name} works along dimension 0, and x has none: pass x.reshape(1)"
        )
        return op(token, group_name, x.movedim(in_dims[2] or 0, 1), *rest), 1

    return rule


def _refuse_batch(name: str) -> Callable[..., None]:
    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> None:
        raise RuntimeError(
            f"gpusync: {name.partition('.')[0]} of a batched tensor inside torch.vmap, which would have to work on one "
            "buffer once for each example: call it outside the vmapped function, on the whole batch"
        )

    return rule


def _refuse_cond(*arguments: Any, **keywords: Any) -> None:
    raise RuntimeError(
        f"gpusync: torch {torch.__version__} does not compile ops that mutate an argument, as those of gpusync do, inside "
        "torch.cond: use torch 2.14 or later (without gradients), move the ops out of the branches, or choose the "
        "branch in Python, by a number that all ranks share"
    )


for _name in ELEMENTWISE:
    torch.library.register_vmap(f"gpusync::{_name}", _whole_batch(_name), lib=lib)
for _name in ALONG_DIMENSION_0:
    torch.library.register_vmap(f"gpusync::{_name}", _batch_behind(_name), lib=lib)
for _name in BUFFER_OPS:
    torch.library.register_vmap(f"gpusync::{_name}", _refuse_batch(_name), lib=lib)
for _name in ALL_OPS:
    # Where a compiler functionalises ordinary code it never comes here, and later versions of torch do not either.
    _overload(_name).py_impl(torch._C.DispatchKey.Functionalize)(_refuse_cond)

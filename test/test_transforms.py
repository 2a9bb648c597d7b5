"""Function transforms (``vmap``, ``torch.func``, forward mode) and control flow around the ops: right, or an error that
says what to do.

Every result is compared with the same transform of a computation that this process does alone, from all ranks' inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rank_tools import check_health, expect
from torch import Tensor
from torch.autograd import forward_ad

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup
from torch_gpusync.nn.functional import copy_to_ranks, reduce_from_ranks
from torch_gpusync.testing import run_ranks

RANKS = 3
STEPS = 3
# The first torch that compiles ops which mutate an argument inside torch.cond.
COMPILES_COND = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)

Exchange = Callable[[Tensor], Tensor]
Transform = Callable[[Exchange, Tensor], Any]


def _inputs(step: int) -> list[Tensor]:
    """All ranks'; whole numbers, so that nothing depends on the order of additions."""
    return [(torch.arange(8.0).view(2, 4) % 5) + 10 * rank + step for rank in range(RANKS)]


# ---- gradients and tangents


def _dual(f: Exchange, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x + 1))).tangent  # type: ignore[return-value]


def _vjp_twice(f: Exchange, x: Tensor) -> Any:
    _, pull_back = torch.func.vjp(f, x)
    return pull_back(x), torch.func.vmap(pull_back)(torch.stack([x, 2 * x]))


def _backward_of_vmap(f: Exchange, x: Tensor) -> Tensor | None:
    x = x.clone().requires_grad_()
    (torch.vmap(f)(x) ** 2).sum().backward()
    return x.grad


def _scalar(f: Exchange) -> Exchange:
    return lambda x: (f(x) ** 3).sum()


TRANSFORMS: dict[str, Transform] = {
    "grad": lambda f, x: torch.func.grad(_scalar(f))(x),
    "vjp": _vjp_twice,
    "jvp": lambda f, x: torch.func.jvp(lambda x: f(x) ** 2, (x,), (x + 1,)),
    "jvp of a part": lambda f, x: torch.func.jvp(lambda y: f(x) * y, (x,), (x + 1,)),
    "linearize": lambda f, x: torch.func.linearize(lambda x: f(x) ** 2, x)[1](x),
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: f(x) ** 2)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda x: f(x) ** 2)(x),
    "hessian": lambda f, x: torch.func.hessian(_scalar(f))(x),
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(_scalar(f)))(x),
    "dual numbers": _dual,
    "vmap": lambda f, x: torch.vmap(f, in_dims=1, out_dims=1)(x),
    "vmap of vmap": lambda f, x: torch.vmap(torch.vmap(f))(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(_scalar(f)))(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.vmap(_scalar(f))(x).sum())(x),
    "backward of vmap": _backward_of_vmap,
    "functional.jvp": lambda f, x: torch.autograd.functional.jvp(lambda x: f(x) ** 2, x, x),
}
COMPILED = ("grad", "jvp", "dual numbers", "vmap", "vmap of grad")


def _f_and_g(sync: SyncGroup, x: Tensor) -> Tensor:
    return reduce_from_ranks(torch.sin(copy_to_ranks(x, sync)) * (sync.rank + 1), sync)


def _check(
    rank: int,
    sync: SyncGroup,
    transforms: dict[str, Transform],
    compiler: Callable[..., Any] = lambda function: function,
) -> list[str]:
    """`all_reduce` of ranks' inputs, and Megatron's f and g around what each rank does with one common input.

    A gradient of `all_reduce` is that of the sum of the ranks' losses.
    """
    found: list[str] = []

    def compare(name: str, seen: Any, wanted: Any) -> None:
        try:
            torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-4)
        except AssertionError as error:
            found.append(f"{name}: {error}")

    for name, transform in transforms.items():
        # Each transform is another function, made by one line of code: the compiler need not keep them apart.
        torch._dynamo.reset()
        run = compiler(lambda x, transform=transform: transform(lambda x: _f_and_g(sync, x), x))
        for step in range(STEPS):
            shared = _inputs(step)[0] / 8
            wanted = transform(lambda x: torch.sin(x) * sum(r + 1 for r in range(RANKS)), shared)
            compare(f"f and g, {name}, step {step}", run(shared), wanted)
    # Forward mode and vmap of all_reduce, with other inputs on each rank: everything is the sum over the ranks.
    for step in range(STEPS):
        xs = _inputs(step)
        total = xs[0] + xs[1] + xs[2]
        compare("all_reduce, vmap", torch.vmap(sync.all_reduce)(xs[rank]), total)
        seen = torch.func.jvp(sync.all_reduce, (xs[rank],), (xs[rank] * 2,))
        compare("all_reduce, jvp", seen, (total, 2 * total))
        weight = rank + 1.0
        seen = torch.func.grad(lambda x, w=weight: (sync.all_reduce(x, "avg") * w).sum())(xs[rank])
        compare("all_reduce, grad", seen, torch.full((2, 4), (1 + 2 + 3) / 3))
    return found


def _check_eager(rank: int) -> list[str]:
    sync = SyncGroup(timeout=60.0)
    found = _check(rank, sync, TRANSFORMS)
    check_health(sync)
    return found


def _check_compiled(rank: int) -> list[str]:
    sync = SyncGroup(timeout=90.0)
    compiler = partial(torch.compile, backend="aot_eager", fullgraph=True)
    found = _check(rank, sync, {name: TRANSFORMS[name] for name in COMPILED}, compiler)
    check_health(sync)
    return found


@pytest.mark.parametrize("check", [_check_eager, _check_compiled], ids=["eager", "compiled"])
def test_transforms(check: Callable[[int], list[str]]) -> None:
    assert run_ranks(check, RANKS, timeout=200) == [[], [], []]


def _check_dropped_tangent(rank: int) -> list[str]:
    """What the ops did before they had a rule: nothing is said, and the tangent is zero."""
    sync = SyncGroup(timeout=60.0)
    sync.all_reduce = lambda x, *rest: type(sync).all_reduce(sync, x.detach(), *rest)  # type: ignore[method-assign]
    return _check(rank, sync, {})


def test_the_check_sees_a_dropped_tangent() -> None:
    for found in run_ranks(_check_dropped_tangent, RANKS):
        assert any("all_reduce, jvp" in text for text in found) and any(
            "all_reduce, grad" in text for text in found
        )
        assert not any("all_reduce, vmap" in text for text in found)


def _refusals(rank: int) -> None:
    sync = SyncGroup(timeout=60.0)
    buffer = sync.buffer("b", (4,), torch.float32)
    x = torch.ones(2, 4)
    expect(SyncError, "put of a batched tensor .* outside the vmapped function", torch.vmap(buffer.put), x)
    get = torch.vmap(lambda offset: buffer.get(size=(1,), offset=offset))
    expect(SyncError, "get of a batched tensor inside torch.vmap", get, torch.arange(2))
    largest = partial(sync.all_reduce, reduce_op="max")
    expect(SyncError, "no gradient for reduce_op='max'", torch.func.jvp, largest, (x,), (x,))
    expect(RuntimeError, "no gradient for reduce_op='max'", torch.func.grad(lambda x: largest(x).sum()), x)
    check_health(sync)


def test_what_transforms_cannot_do() -> None:
    run_ranks(_refusals, RANKS)


def _reraised(function: Callable[..., Any], *args: Any) -> Any:
    """Compilers wrap what they were told in exceptions of their own: the text is what counts."""
    try:
        return function(*args)
    except Exception as error:
        raise Exception(str(error)) from None


def _once_for_the_batch(rank: int) -> None:
    sync = SyncGroup(timeout=60.0)
    buffer = sync.buffer("b", (4,), torch.float32)
    before = torch.ops.gpusync._calls(sync.name)

    def example(x: Tensor) -> Tensor:
        sync.barrier()
        return x + buffer.get()

    assert torch.equal(torch.vmap(example)(torch.ones(5, 4)), torch.ones(5, 4))
    assert torch.ops.gpusync._calls(sync.name) == before + 2


def test_what_meets_no_batched_tensor_runs_once_for_the_batch() -> None:
    run_ranks(_once_for_the_batch, RANKS)


# ---- torch.cond


def _cond(rank: int, backend: str) -> list[str]:
    """Branches that exchange, by a condition that all ranks share; data and branch change at every step."""
    sync = SyncGroup(timeout=60.0)
    buffer = sync.buffer("b", (2, 4), torch.float32)

    def far(x: Tensor) -> Tensor:
        buffer.put(x)
        sync.barrier()
        peer = buffer.get((rank + 1) % RANKS)
        sync.barrier()
        return peer * 2

    def near(x: Tensor) -> Tensor:
        return sync.all_reduce(x) + 1

    def step(where: Tensor, x: Tensor) -> Tensor:
        buffer.put(-x)
        sync.barrier()
        y = torch.cond(where, far, near, (x + 1,))
        sync.barrier()
        return y + sync.all_reduce(x)

    def wanted(where: bool, number: int) -> Tensor:
        xs = _inputs(number)
        total = xs[0] + xs[1] + xs[2]
        return total + (2 * (xs[(rank + 1) % RANKS] + 1) if where else total + RANKS + 1)

    found = []
    run = step if backend == "eager" else torch.compile(step, backend=backend, fullgraph=True)
    for number in range(6):
        where = number % 3 != 1
        try:
            seen = run(torch.tensor(where), _inputs(number)[rank])
        except Exception as error:
            return [str(error)]
        if not torch.equal(seen, wanted(where, number)):
            found.append(f"step {number}: {seen} instead of {wanted(where, number)}")
    x = _inputs(0)[rank].requires_grad_()
    if backend != "eager":
        try:
            run(torch.tensor(True), x)
        except Exception as error:
            if "does not currently support training with in-place input or buffer mutations" not in str(
                error
            ):
                found.append(str(error))
        else:
            found.append("a gradient through torch.cond was not refused")
    check_health(sync)
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_case_32_ops_inside_cond_are_right_or_refused(backend: str) -> None:
    findings = run_ranks(_cond, RANKS, backend, timeout=200)
    if backend == "eager" or COMPILES_COND:
        assert findings == [[], [], []]
        return
    for [text] in findings:
        ours = "gpusync: torch" in text and "move the ops out of the branches" in text
        assert ours or "might be modifying the input" in text, text  # torch 2.11 refuses it by itself


def _while(x: Tensor, sync: SyncGroup) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, sync.all_reduce(x)

    return while_loop(lambda i, x: i < 2, body, (torch.tensor(0), x))[1]  # type: ignore[no-any-return]


def test_what_compilers_of_transforms_refuse() -> None:
    """Compiled by one rank, which is all of its group: nobody waits for it."""
    [sync] = torch_gpusync.virtual_ranks(1, timeout=20.0)
    buffer = sync.buffer("b", (4,), torch.float32)
    x = torch.ones(2, 4)
    compiled = torch.compile(torch.vmap(buffer.put), backend="aot_eager", fullgraph=True)
    expect(Exception, "put of a batched tensor .* outside the vmapped function", _reraised, compiled, x)
    assert torch.equal(_while(x, sync), x)  # eager mode runs it
    compiled = torch.compile(lambda x: _while(x, sync), backend="aot_eager", fullgraph=True)
    expect(Exception, "body_fn might be modifying the input", _reraised, compiled, x)
    check_health(sync)
    sync.close()

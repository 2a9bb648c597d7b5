"""all_reduce_rms_norm on the CPU: method and op, eager and compiled; and where it would be one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from rank_tools import expect
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup, rms_norm
from torch_gpusync.nn import SyncModule
from torch_gpusync.testing import check_order, run_ranks

N = 24
EPS = 1e-5
Call = Callable[..., tuple[Tensor, Tensor]]


def op_of(sync: SyncGroup) -> Call:
    """The op itself, which is not what the method calls on the CPU."""
    op = torch.ops.gpusync.all_reduce_rms_norm
    return lambda *arguments: op(sync.token, sync.name, *arguments)


def reference(total: Tensor, weight: Tensor, eps: float = EPS, bias: float = 1.0) -> tuple[Tensor, Tensor]:
    """torch's own, of the residual and all ranks' summands together. (Its weight is one for all examples.)"""
    return torch.nn.functional.rms_norm(total, (N,), None, eps) * (weight + bias), total


def inputs(step: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """The three ranks' x, the residual and the weight."""
    generator = torch.Generator().manual_seed(step)
    *xs, residual = torch.randn(4, 5, 2, N, generator=generator)
    return xs, residual, torch.rand(N, generator=generator)


def _check_gradients(rank: int, call: Call, step: int) -> None:
    """Each rank's loss has a weight of its own: x's gradient is that of the sum of them, the others' of rank's alone."""
    xs, *others = inputs(step)
    mine = [y.clone().requires_grad_() for y in (xs[rank], *others)]
    norm, total = call(*mine, EPS, 1.0)
    ((norm + total.sin()) * (rank + 1)).sum().backward()
    residual, weight = (y.requires_grad_() for y in others)
    wanted = reference(torch.stack(xs).sum(0) + residual, weight)
    (wanted[0] + wanted[1].sin()).sum().backward()
    torch.testing.assert_close((norm, total), wanted)
    factors = ((1 + 2 + 3, residual.grad), (rank + 1, residual.grad), (rank + 1, weight.grad))
    for y, (factor, gradient) in zip(mine, factors, strict=True):
        torch.testing.assert_close(y.grad, factor * gradient, rtol=1e-4, atol=1e-4)


def _check_values(rank: int, call: Call, step: int) -> None:
    xs, residual, weight = inputs(step)
    with torch.no_grad():
        seen = call(xs[rank], residual, weight.requires_grad_(), EPS, 1.0)
        torch.testing.assert_close(seen, reference(torch.stack(xs).sum(0) + residual, weight))


def _tangents(f: Call, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """Of all arguments; of dual numbers only the residual has one."""
    jvp = torch.func.jvp(f, (x, residual, weight), (x.cos(), residual.sin(), weight + 1))
    with forward_ad.dual_level():
        dual = f(x, forward_ad.make_dual(residual, residual + 1), weight)
        return jvp, [forward_ad.unpack_dual(y).tangent for y in dual]


def _batches(f: Call, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    weights = torch.stack([weight, 2 * weight], dim=1)
    return (
        torch.vmap(f, in_dims=(1, 1, None))(x, residual, weight),
        torch.vmap(f, in_dims=(0, None, None), out_dims=1)(x, residual[0], weight),
        torch.vmap(f, in_dims=(None, 0, None))(x[0], residual, weight),
        torch.vmap(f, in_dims=(1, None, 1))(x, residual[:, 0], weights),
        torch.vmap(f, in_dims=(None, None, 1))(x, residual, weights),
        torch.vmap(torch.vmap(f, in_dims=(1, 0, None)), in_dims=(None, None, 1))(
            x, residual.transpose(0, 1), weights
        ),
        torch.vmap(torch.func.grad(lambda *y: f(*y)[0].sin().sum(), (1, 2)))(
            x, residual, weight.expand(5, N)
        ),
    )


def _check_transforms(rank: int, call: Call, backend: str | None) -> None:
    """What depends on x alone is the same on all ranks here, so that each has a reference of its own."""
    _, residual, weight = inputs(7)
    x = inputs(8)[1]

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return call(x, residual, weight, EPS, 1.0)

    def wanted(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference(3 * x + residual, weight)

    for transform in (_tangents, _batches):
        run: Any = lambda *y, transform=transform: transform(ours, *y)  # noqa: E731
        if backend:
            run = torch.compile(run, backend=backend, fullgraph=True)
        torch.testing.assert_close(
            run(x, residual, weight), transform(wanted, x, residual, weight), rtol=1e-4, atol=1e-4
        )


def _values(rank: int) -> None:
    sync = SyncGroup(timeout=60.0)
    for call in (sync.all_reduce_rms_norm, SyncModule(sync).all_reduce_rms_norm, op_of(sync)):
        for backend in (None, "aot_eager", "inductor"):
            torch._dynamo.reset()
            run = torch.compile(call, backend=backend, fullgraph=True) if backend else call
            for step in range(3):
                _check_gradients(rank, run, 2 * step)
                _check_values(rank, run, 2 * step + 1)


def test_values_and_gradients() -> None:
    run_ranks(_values, 3, timeout=200)


def _transforms(rank: int, backend: str | None) -> None:
    sync = SyncGroup(timeout=60.0)
    for call in (sync.all_reduce_rms_norm, op_of(sync)):
        torch._dynamo.reset()
        _check_transforms(rank, call, backend)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_transforms(backend: str | None) -> None:
    """Forward mode, vmap over any of the arguments, and both together. (In processes: torch counts levels of forward mode
    for all threads.)"""
    run_ranks(_transforms, 3, backend, timeout=200)


@pytest.mark.parametrize("asks", [True, False])
def test_a_tangent_that_only_autograd_knows_of(
    sync: SyncGroup, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """Of a dual number in compiled code. Without the op's question it is lost, and nothing is said."""
    if not asks:
        monkeypatch.setattr(rms_norm, "_has_tangent", lambda x: False)

    def tangent(x: Tensor) -> Tensor | None:
        with forward_ad.dual_level():
            _, total = op_of(sync)(x, forward_ad.make_dual(x, x + 1), x[0], EPS)
            return forward_ad.unpack_dual(total).tangent

    torch._dynamo.reset()
    x = torch.rand(2, 8)
    found = torch.compile(tangent, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found, x + 1) if asks else found is None


def _half(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)
    x, weight = torch.full((2, 8), 1.0 + rank, dtype=torch.bfloat16), torch.full((8,), 0.5)
    for call in (sync.all_reduce_rms_norm, op_of(sync)):
        norm, total = call(x, torch.ones_like(x), weight.bfloat16(), 0.0)
        assert norm.dtype == total.dtype == torch.bfloat16
        assert total.tolist() == [[7.0] * 8] * 2 and norm.tolist() == [[0.5] * 8] * 2
        # Sums of these are no numbers of float16: the norm is taken in float32, of the sum as it was rounded.
        x = (torch.arange(16.0).view(8, 2).t() / 3 + rank).half()
        norm, total = call(x, x.new_full((2, 8), 200.0), weight, EPS, 1.0)
        assert norm.is_contiguous() and total.is_contiguous()
        assert torch.equal(total, sync.all_reduce(x) + 200)
        wide = total.float()
        wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * 1.5
        assert torch.equal(norm, wanted.half())
        x = torch.full((2, 8), 1.0 + rank, dtype=torch.bfloat16)


def test_16_bit_types_are_rounded_once() -> None:
    run_ranks(_half, 3)


@pytest.fixture
def sync() -> Iterator[SyncGroup]:
    [group] = torch_gpusync.virtual_ranks(1, timeout=20.0)
    yield group
    group.close()


def test_what_does_not_fit_together_is_refused(sync: SyncGroup) -> None:
    ones = torch.ones
    for pattern, *bad in (
        (
            "a floating-point x and a residual of the same shape and dtype",
            ones(2, 8),
            ones(2, 8).bfloat16(),
            ones(8),
        ),
        ("a floating-point x and a residual of the same shape and dtype", ones(1, 8), ones(2, 8), ones(8)),
        ("a floating-point x", ones(2, 8, dtype=torch.int32), ones(2, 8, dtype=torch.int32), ones(8)),
        ("a weight for each of x's last dimension", ones(2, 8), ones(2, 8), ones(2, 1)),
        ("a weight for each of x's last dimension", torch.tensor(1.0), torch.tensor(1.0), ones(1)),
        ("tensors on one device, not x on 'cpu', residual", ones(2, 8), ones(2, 8), ones(8, device="meta")),
    ):
        text = f"all_reduce_rms_norm takes {pattern}"
        expect(SyncError, text, sync.all_reduce_rms_norm, *bad, EPS)
        with pytest.raises(RuntimeError, match=text):
            op_of(sync)(*bad, EPS)
        with pytest.raises(RuntimeError, match=text):
            op_of(sync)(bad[0], bad[1], bad[2].float().requires_grad_(), EPS)
    with pytest.raises(RuntimeError, match="all_reduce_rms_norm takes a weight"):
        torch.vmap(op_of(sync), in_dims=(0, 0, None, None))(ones(8), ones(8), ones(8), EPS)
    assert not sync.is_broken


# ---- which of the two ways is taken, with a stand-in for the GPU's kernel


@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "wanted"),
    [
        ((4, 8), torch.float32, torch.float32, True),
        ((4, 8), torch.bfloat16, torch.bfloat16, True),
        ((4, 8), torch.bfloat16, torch.float32, False),
        ((4, 8), torch.float16, torch.float16, False),  # has no limit here
        ((4, 8), torch.float64, torch.float64, False),
        ((8,), torch.float32, torch.float32, True),
        ((4, 2, 1), torch.float32, torch.float32, False),  # rows of 4 bytes
        ((4, 6), torch.bfloat16, torch.bfloat16, False),  # of 12
        ((4, 12), torch.bfloat16, torch.bfloat16, True),
        ((0, 8), torch.float32, torch.float32, False),
        ((4, 0), torch.float32, torch.float32, False),
        ((8, 8), torch.float32, torch.float32, True),  # just the limit
        ((9, 8), torch.float32, torch.float32, False),
        ((9, 8), torch.bfloat16, torch.bfloat16, False),  # that of another dtype
        ((20, 2), torch.float32, torch.float32, True),  # just as many rows
        ((3, 7, 2), torch.float32, torch.float32, False),
    ],
)
def test_what_fits_one_kernel(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, wanted: bool
) -> None:
    x, weight = torch.empty(shape, dtype=dtype), torch.empty(shape[-1], dtype=weight_dtype)
    limits = {torch.float32: (256, 20), torch.bfloat16: (128, 20)}
    assert rms_norm.fits(x, weight, limits) is wanted
    assert not rms_norm.fits(x, weight, {})  # a group on the CPU


class Kernel:
    """Stands for the kernel, and counts its launches and all compilations."""

    def __init__(self, sync: SyncGroup, limit: int) -> None:
        self.launches = 0
        self.graphs: list[list[str]] = []
        self.sync = sync
        sync._norm_limits[torch.float32] = limit, 100

    def default(self, token: Tensor, group_name: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        assert group_name == self.sync.name and len(arguments) == 5
        self.launches += 1
        return rms_norm.steps(lambda x: x + 0, *arguments)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
            arguments = [argument for node in graph.graph.nodes for argument in (node.target, *node.args)]
            ops = [x for x in arguments if isinstance(x, torch._ops.OpOverload) and x.namespace == "gpusync"]
            self.graphs.append([op._schema.name.removeprefix("gpusync::") for op in ops])
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, keep_inference_input_mutations=True)
        return torch.compile(function, backend=backend, fullgraph=True, **options)

    def seen(self) -> tuple[list[list[str]], int]:
        """Ops of each graph, and launches, since the last time."""
        seen = self.graphs, self.launches
        self.graphs, self.launches = [], 0
        return seen


@pytest.fixture
def kernel(sync: SyncGroup, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stand_in = Kernel(sync, limit=4 * N * 8)
    monkeypatch.setattr(rms_norm, "_in_one_kernel", stand_in.default)
    return stand_in


STEPS, FUSED = ["all_reduce"], ["all_reduce_rms_norm"]


def data(rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, residual = torch.randn(2, rows, N, generator=generator)
    return x, residual, torch.rand(N, generator=generator)


def test_one_kernel_where_no_gradient_is_wanted(sync: SyncGroup, kernel: Kernel) -> None:
    x, residual, weight = data()
    wanted = reference(x + residual, weight)
    for method in (sync.all_reduce_rms_norm, SyncModule(sync).all_reduce_rms_norm):
        for each in (kernel.compile(method), method):
            graphs = int(each is not method)
            torch.testing.assert_close(each(x, residual, weight, EPS, 1.0), wanted)
            assert kernel.seen() == ([FUSED] * graphs, 1)
            for index in range(3):
                arguments = [x, residual, weight]
                arguments[index] = arguments[index].clone().requires_grad_()
                norm, _ = each(*arguments, EPS, 1.0)
                torch.testing.assert_close(norm, wanted[0])
                assert norm.requires_grad
                ops, launches = kernel.seen()
                assert (ops[:1], launches) == ([STEPS] * graphs, 0), index
                with torch.no_grad():
                    torch.testing.assert_close(each(*arguments, EPS, 1.0), wanted)
                assert kernel.seen() == ([FUSED] * graphs, 1)
            with torch.inference_mode():
                torch.testing.assert_close(each(x, residual, weight, EPS, 1.0), wanted)
            assert kernel.seen()[1] == 1


def test_beyond_the_limit_a_compiler_sees_the_steps(sync: SyncGroup, kernel: Kernel) -> None:
    for dynamic in (None, True):
        run = kernel.compile(sync.all_reduce_rms_norm, dynamic=dynamic)
        for rows, launches in ((8, 1), (7, 1), (9, 0), (5, 1), (10, 0), (6, 1)):
            x, residual, weight = data(rows)
            torch.testing.assert_close(
                run(x, residual, weight, EPS, 1.0), reference(x + residual, weight), msg=f"{rows}"
            )
            ops, launched = kernel.seen()
            assert launched == launches and ops in ([], [FUSED if launches else STEPS]), rows


def test_a_size_that_only_data_tell_is_left_to_the_steps(sync: SyncGroup, kernel: Kernel) -> None:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        some = x[x[:, 0] > 0]
        return sync.all_reduce_rms_norm(some, some, weight, EPS, 1.0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, _, weight = data()
        run = kernel.compile(step)
        torch.testing.assert_close(run(x, weight), reference(2 * x[x[:, 0] > 0], weight))
    assert kernel.seen() == ([STEPS], 0)


def test_a_compiled_op_chooses_when_it_runs(sync: SyncGroup, kernel: Kernel) -> None:
    x, residual, weight = data()
    wanted = reference(x + residual, weight)
    run = kernel.compile(op_of(sync))
    for limit, launches in ((4 * N * 8, 1), (100, 0), (4 * N * 8, 1)):
        sync._norm_limits[torch.float32] = limit, 100
        torch.testing.assert_close(run(x, residual, weight, EPS, 1.0), wanted)
        assert kernel.seen()[1] == launches
    # And with a gradient it is the steps.
    norm, _ = run(x.requires_grad_(), residual, weight, EPS, 1.0)
    assert norm.requires_grad
    assert kernel.seen() == ([STEPS], 0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("rows", "fixed"), [(4, FUSED), (20, STEPS)])
def test_an_exported_program_is_for_any_size(
    sync: SyncGroup, kernel: Kernel, rows: int, fixed: list[str], strict: bool
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sync = SyncModule(sync)

        def forward(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return self.sync.all_reduce_rms_norm(x, residual, weight, EPS, 1.0)

    batch = torch.export.Dim("batch", min=1, max=64)
    for shapes, expected in ((({0: batch}, {0: batch}, None), FUSED), (None, fixed)):
        with torch.no_grad():
            program = torch.export.export(Model(), data(rows), dynamic_shapes=shapes, strict=strict)
        ops = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        assert [op._schema.name for op in ops if op.namespace == "gpusync"] == [
            f"gpusync::{name}" for name in expected
        ]
        for size in (4, 20) if shapes else (rows,):
            x, residual, weight = data(size)
            found = program.module()(x, residual, weight)
            torch.testing.assert_close(found, reference(x + residual, weight))
            assert kernel.seen()[1] == (size == 4 and expected == FUSED)


@pytest.mark.parametrize("in_dims", [(0, 0, None), (0, None, 0), (0, 0, 0)])
def test_an_empty_batch(sync: SyncGroup, in_dims: tuple[int | None, ...]) -> None:
    shapes = [(0, 4, N), (0, 4, N), (0, N)]
    arguments = [
        torch.ones(shape if dim == 0 else shape[1:]) for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    norm, total = torch.vmap(lambda *tensors: op_of(sync)(*tensors, EPS), in_dims=in_dims)(*arguments)
    assert norm.shape == total.shape == (0, 4, N)


def test_transforms_know_the_kernel_by_its_steps(sync: SyncGroup, kernel: Kernel) -> None:
    x, residual, weight = data()
    more = data(9)

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return sync.all_reduce_rms_norm(x, residual, weight, EPS, 1.0)

    def wanted(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference(x + residual, weight)

    for transform, launches in (
        (lambda f: torch.func.jvp(f, (x, residual, weight), (residual, x, weight)), 0),
        (lambda f: torch.func.grad(lambda y: f(x, y, weight)[0].sin().sum())(residual), 0),
        (lambda f: torch.vmap(f, in_dims=(0, 0, None))(x, residual, weight), 1),  # the whole batch
        (lambda f: torch.vmap(f, in_dims=(0, 0, None))(*more), 0),  # which is too large
        (lambda f: torch.vmap(f)(x, residual, weight.expand(8, N)), 0),
    ):
        reference_ = transform(wanted)
        for run in (transform, kernel.compile(transform)):
            torch.testing.assert_close(run(ours), reference_, rtol=1e-4, atol=1e-4)
            assert kernel.seen()[1] == launches


def test_inductor_and_check_order_take_the_op(sync: SyncGroup, kernel: Kernel) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        norm, residual = sync.all_reduce_rms_norm(x.sin(), residual, weight, EPS)
        norm, residual = sync.all_reduce_rms_norm(norm * 2, residual, weight, EPS)
        return norm + residual

    with torch.no_grad():
        log = check_order(block, *data(), fullgraph=True)
    assert [op.name for op in log] == ["gpusync.all_reduce_rms_norm"] * 2
    assert kernel.launches == 2 * (3 + 2 + 2)
    x, residual, weight = data()
    log = check_order(block, x.requires_grad_(), residual, weight, backend="aot_eager", fullgraph=True)
    assert [op.name for op in log] == ["gpusync.all_reduce"] * 4
    assert kernel.launches == 2 * (3 + 2 + 2)


def test_the_limits_go_with_the_group() -> None:
    from torch_gpusync.ops import norm_limits

    [sync] = torch_gpusync.virtual_ranks(1, name="limits")
    assert sync._norm_limits is norm_limits["limits/0"] is SyncModule(sync)._norm_limits
    assert sync._norm_limits == {}
    sync.close()
    assert "limits/0" not in norm_limits

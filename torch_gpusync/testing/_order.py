"""check_order: does compiled code run the communication ops that eager mode runs, in its order and with its data?"""

from __future__ import annotations

import contextvars
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_gpusync.testing._differences import compare_logs, distance
from torch_gpusync.testing._log import NAMESPACES, ExecutedOp, Recorder
from torch_gpusync.testing._tap import adopt, observe, observers

Backend = str | Callable[..., Any]
T = TypeVar("T")


class OrderError(AssertionError):
    """Compiled code did something else than eager mode.

    Attributes:
        findings: what differs, one text for each.
    """

    def __init__(self, findings: Sequence[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = list(findings)

    def __reduce__(self) -> Any:
        return OrderError, (self.findings,)


def check_order(
    fn: Callable[..., Any],
    *args: Any,
    backend: Backend | Sequence[Backend] = ("aot_eager", "inductor"),
    dynamic: bool | None = None,
    fullgraph: bool = False,
    namespaces: Sequence[str] = (),
    ignore: Sequence[str] = ("token",),
    tolerance: float = 0.01,
    timeout: float = 300.0,
) -> list[ExecutedOp]:
    """Run ``fn(*args)`` eagerly and compiled, and compare the communication ops that were executed.

    Compared are, op by op: name, order, arguments, the data that each op was given and returned, and, where an op may
    change a tensor that outlives the call, what that memory itself held when the op began, since other ranks may look
    at it then. Then what ``fn`` returned and, if that requires grad, a backward pass with its ops and the gradients of
    ``args``. The calls alternate between ``args`` as they are and other values in the same tensors, so that data left
    over from the call before are told from data of this one; the tensors hold their first values again at the end.

    Of one rank it shows what the compiler did to that rank's ops. What peers saw only runs of several ranks show:
    call it on all of them, under :func:`ranks` or :func:`run_ranks`. Every rank makes the same number of calls of
    ``fn``, whatever it finds: three, and two for each back end.

    Args:
        fn: a function or a module. All calls must run the same ops.
        args: tensors, in lists and dicts too, and anything else. Floating-point tensors change between the calls
            (x becomes x / 2 + 1/4), unless they are inference tensors or their elements share memory.
        backend: one or several, as for ``torch.compile``.
        dynamic, fullgraph: as for ``torch.compile``.
        namespaces: further libraries to look at besides ``gpusync``, ``c10d`` (and with it the functional collectives)
            and ``symm_mem``, as in ``torch.ops.NAMESPACE``; their ops must be defined by then.
        ignore: names of arguments whose values and memory are not looked at, such as ordering tokens.
        tolerance: how far data may be off, relative to the largest element: kernels that are fused round otherwise.
        timeout: seconds. The calls run in a thread of their own, with this one's grad mode, inference mode, CUDA device
            and stream; a call that hangs beyond the limit is left there.

    Returns:
        The ops that eager mode ran: one at least.

    Gradients of ``args`` are computed for the comparison and their ``grad`` is None afterwards; parameters and other
    state of a module that ``fn`` is or uses are not compared, and have seen all the calls.

    Raises:
        OrderError: something differs, compiled code raised, nothing was there to compare, or the time was over.
        Exception: what ``fn`` raised in eager mode.
    """
    if isinstance(namespaces, str):
        raise TypeError(f"namespaces are a list of names, not one: [{namespaces!r}]")
    backends = [backend] if isinstance(backend, str) or callable(backend) else list(backend)
    check = _Check(fn, args, (*NAMESPACES, *namespaces), tuple(ignore), tolerance)

    def run() -> list[ExecutedOp]:
        return check.run(backends, dynamic, fullgraph)

    return _within(timeout, run, lambda: f"{check.stage} did not end within {timeout:g} s")


class _Call:
    """One call of the function under test, with its log and copies of what came out."""

    def __init__(self, like: Sequence[ExecutedOp] = ()) -> None:
        self.recorder = Recorder(True, like)
        self.outputs: dict[str, Tensor] = {}

    @property
    def log(self) -> list[ExecutedOp]:
        return self.recorder.log


class _Counter:
    """A back end, and how often the graphs that it has compiled have run: torch.compile may fall back to eager mode
    without an error, and then there is nothing to compare."""

    def __init__(self, backend: Backend) -> None:
        from torch._dynamo import lookup_backend  # costs a second, which importing this module should not

        self.compiler: Any = lookup_backend(backend)
        self.ran = 0

    def compile(
        self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any
    ) -> Callable[..., Any]:
        compiled = self.compiler(graph, inputs, **options)

        def run(*args: Any) -> Any:
            self.ran += 1
            return compiled(*args)

        return run


def _room_to_compile() -> Any:
    """Virtual ranks share their functions' code, and the number of compilations that torch allows for it."""
    from torch._dynamo import config

    limit = max(256, config.recompile_limit)
    return config.patch(recompile_limit=limit, accumulated_recompile_limit=4 * limit)


class _Check:
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        namespaces: tuple[str, ...],
        ignore: tuple[str, ...],
        tolerance: float,
    ) -> None:
        self.fn, self.args = fn, args
        self.namespaces, self.ignore, self.tolerance = namespaces, ignore, tolerance
        self.leaves = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        self.first_values = [(x, x.detach().clone()) for x in self.leaves if _is_writable(x)]
        self.stage = "the eager call"

    def run(self, backends: list[Backend], dynamic: bool | None, fullgraph: bool) -> list[ExecutedOp]:
        try:
            eager = self.call(self.fn)
            self.call(self.fn, other_values=True)
            self.reference = self.call(self.fn)
            if [x.call for x in eager.log] != [x.call for x in self.reference.log]:
                text = compare_logs(eager.log, self.reference.log, "the first call", "the next one")
                raise OrderError([f"eager mode does not run the same ops in every call: {text}"])
            self.eager = eager
            findings: list[str] = []
            for backend in backends:
                name = backend if isinstance(backend, str) else getattr(backend, "__name__", repr(backend))
                self.stage = f"{name}: the compiled call"
                counter = _Counter(backend)
                fn = torch.compile(self.fn, backend=counter.compile, dynamic=dynamic, fullgraph=fullgraph)
                with _room_to_compile():
                    found, raised = self.compiled(fn, counter)
                findings += [f"{name}: {text}" for text in found]
                if raised:
                    break  # then a group may be broken, and other ranks have stopped too
            if not eager.log:
                findings.append(
                    f"nothing was compared: eager mode ran no op of {', '.join(self.namespaces)} (is the name of a library "
                    "misspelt in `namespaces`?)"
                )
            if findings:
                raise OrderError(findings)
            return eager.log
        finally:
            self.fill(other_values=False)

    def compiled(self, fn: Callable[..., Any], counter: _Counter) -> tuple[list[str], bool]:
        """What differs, and whether it has raised."""
        call = _Call()
        try:
            self.call(fn, other_values=True, call=call)
            call = _Call(self.eager.log)
            counter.ran = 0
            self.call(fn, call=call)
        except Exception as error:
            found = [f"compiled code raised {type(error).__name__}: {error}"]
            ran = self.eager.log[: len(call.log)]
            if text := compare_logs(ran, call.log, "eager", "compiled"):
                found.append(text)
            return found, True
        if text := compare_logs(self.eager.log, call.log, "eager", "compiled"):
            return [text], False
        if counter.ran == 0:
            return [
                "nothing was compared: torch.compile left everything to eager mode (its log says why; after many "
                "compilations of one function torch._dynamo.reset() helps)"
            ], False
        found = [
            text
            for number in range(len(call.log))
            for text in self.compare_values(
                number, *(x.log[number] for x in (self.eager, self.reference, call))
            )
        ]
        for name, x in self.eager.outputs.items():
            if distance(x, self.reference.outputs.get(name), self.tolerance) == "":
                other = call.outputs.get(name)
                if other is None:
                    found.append(f"{name} is missing")
                elif off := distance(x, other, self.tolerance):
                    found.append(f"{name} differs: {off}")
        return found, False

    def compare_values(
        self, number: int, eager: ExecutedOp, again: ExecutedOp, compiled: ExecutedOp
    ) -> list[str]:
        """What one op was given and returned. What differs between two eager calls, a counter say, is not compared."""
        found = []
        where = f"op {number + 1}, {compiled}"
        for name, x in eager.payload.items():
            if name.split("[")[0] in self.ignore or distance(x, again.payload[name], self.tolerance):
                continue
            if name in eager.shared:
                # Memory made during the call: nobody else has its address, and it may be there to be filled.
                lives_on = _is_same_memory(eager.shared[name], again.shared.get(name))
                if lives_on and (off := distance(x, compiled.watched.get(name), self.tolerance)):
                    found.append(
                        f"{where}: the memory of {name}, which outlives the call, differs when the op begins: {off}. "
                        "Other ranks that look there see old data: the compiler works on a copy until the graph ends"
                    )
            elif off := distance(x, compiled.payload.get(name), self.tolerance):
                found.append(f"{where}: it was given other data as {name}: {off}")
        for index, (x, y, z) in enumerate(zip(eager.results, again.results, compiled.results, strict=True)):
            if distance(x, y, self.tolerance) == "" and (off := distance(x, z, self.tolerance)):
                found.append(f"{where}: it returned other data as result {index}: {off}")
        return found

    def call(self, fn: Callable[..., Any], *, other_values: bool = False, call: _Call | None = None) -> _Call:
        self.fill(other_values)
        call = call or _Call()
        for x in self.leaves:
            if x.is_leaf and x.requires_grad:
                x.grad = None
        with observe(call.recorder, self.namespaces):
            result = fn(*self.args)
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            call.outputs = {f"result {k}": x.detach().clone() for k, x in enumerate(outputs)}
            roots = [x for x in outputs if x.requires_grad and x.grad_fn is not None]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
        for k, x in enumerate(self.leaves):
            if x.is_leaf and x.grad is not None:
                call.outputs[f"the gradient of argument tensor {k}"] = x.grad.detach().clone()
                x.grad = None
        return call

    def fill(self, other_values: bool) -> None:
        with torch.no_grad():
            for x, first in self.first_values:
                x.copy_(first / 2 + 0.25 if other_values and first.is_floating_point() else first)


def _is_writable(x: Tensor) -> bool:
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return torch._debug_has_internal_overlap(x) != 1


def _is_same_memory(x: Tensor, y: Tensor | None) -> bool:
    """The first tensor is still held, so nothing that was made later can have its address."""
    return y is not None and x.device == y.device and x.data_ptr() == y.data_ptr()


def _within(seconds: float, body: Callable[[], T], describe: Callable[[], str]) -> T:
    """Runs `body` in another thread, with this one's state; raises OrderError with its stack if it does not end."""
    outcome: list[T] = []
    error: list[BaseException] = []
    context, found = contextvars.copy_context(), observers()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(inference))
                stack.enter_context(torch.set_grad_enabled(grad))
                stack.enter_context(adopt(found))
                if stream is not None:
                    stack.enter_context(torch.cuda.stream(stream))
                outcome.append(context.run(body))
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run, name="check_order", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame else ""
        raise OrderError([f"{describe()}; it is stuck here:\n{where}"])
    if error:
        raise error[0]
    return outcome[0]

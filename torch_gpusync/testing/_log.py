"""The log of communication ops that really ran, in eager and in compiled code alike (see _tap.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_gpusync.testing._tap import observe

# torch's own libraries of communication. Functional collectives (torch.ops._c10d_functional) are in it: whatever
# variant of one a compiler chooses, it runs an op of c10d.
NAMESPACES = ("gpusync", "c10d", "symm_mem")
# Ops of c10d by what they do: which variant runs depends on how they were called.
_C10D = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all_single",
    "alltoall_": "all_to_all",
}
# Arguments that say how an op of c10d is waited for, not what it does.
_OF_THE_CALL = ("async_op", "timeout", "sparse_indices", "device_ids")
# Peers read and write the tensors themselves, though the schemas do not say so.
_SHARED_MEMORY = ("symm_mem",)


@dataclass
class ExecutedOp:
    """One call of an op.

    Attributes:
        name: as in ``torch.ops``, with the overload unless it is the default one: ``gpusync.barrier``. Variants of one
            collective of c10d have one name: ``c10d.all_reduce``.
        arguments: those that are no tensors, by the schema's names, defaults included. A process group is shown by
            its name; other objects of c10d are left out.
        tensors: the tensor arguments' dtypes and shapes, by name; an element of a list is ``name[0]``. Of c10d only
            those that are sent.
        payload: what they held when the op began (copies); empty unless values were asked for.
        results: copies of what it returned; empty likewise, and for c10d, whose results come later.
    """

    name: str
    arguments: dict[str, Any]
    tensors: dict[str, str]
    payload: dict[str, Tensor] = field(default_factory=dict, repr=False)
    results: list[Tensor] = field(default_factory=list, repr=False)
    # The tensor arguments that the op may change, or peers look into: themselves, not copies.
    shared: dict[str, Tensor] = field(default_factory=dict, repr=False)
    # What another call's `shared` held when this op began.
    watched: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def call(self) -> tuple[Any, ...]:
        """What makes two calls the same call."""
        return self.name, self.arguments, self.tensors

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.tensors.items() if name != "token"]
        words += [f"{name}={value!r}" for name, value in self.arguments.items()]
        return f"{self.name}({', '.join(words)})"


@contextmanager
def executed_ops(*namespaces: str, values: bool = False) -> Iterator[list[ExecutedOp]]:
    """Fill a list with the communication ops that this thread runs, eager or compiled, forward or backward.

    Args:
        namespaces: further libraries to look at, as in ``torch.ops.NAMESPACE``; their ops must be defined by then.
        values: also copy what the ops were given and what they returned.

    Ops that CUDA graphs replay do not run on the host and are not seen; a call that is captured is.
    """
    recorder = Recorder(values, [])
    with observe(recorder, (*NAMESPACES, *namespaces)):
        yield recorder.log


class Recorder:
    """Observes ops; `like` is another log, whose shared memory is copied at the same places of this one."""

    def __init__(self, values: bool, like: Sequence[ExecutedOp]) -> None:
        self.values = values
        self.like = like
        self.log: list[ExecutedOp] = []

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        namespace, _, name = op._schema.name.partition("::")
        overload = f".{op._schema.overload_name}" if op._schema.overload_name else ""
        entry = ExecutedOp("", {}, {})
        tensors: dict[str, Tensor] = {}
        for argument, value in _bound(op._schema, args, kwargs):
            found = dict(_tensors(argument.name, value))
            written = argument.alias_info is not None and argument.alias_info.is_write
            if namespace == "c10d":
                _add_of_c10d(entry, tensors, name, argument.name, value, args)
                continue
            tensors |= found
            if not found:
                entry.arguments[argument.name] = _plain(value)
            if written or namespace in _SHARED_MEMORY:
                entry.shared |= {key: x.detach() for key, x in found.items()}
        if namespace == "gpusync":
            name = name.removeprefix("_")  # _all_reduce is all_reduce without its gradient
        elif namespace == "c10d":
            name = _C10D.get(name, name.strip("_"))
        entry.name = f"{namespace}.{name}{overload}"
        entry.tensors = {key: _describe(x) for key, x in tensors.items()}
        if not self.values or _is_capturing(tensors):
            entry.shared = {}
        else:
            entry.payload = {key: _copy(x) for key, x in tensors.items()}
            if len(self.log) < len(self.like):
                entry.watched = {key: _copy(x) for key, x in self.like[len(self.log)].shared.items()}
        self.log.append(entry)

        def end(result: Any) -> None:
            if self.values and namespace != "c10d" and not _is_capturing(tensors):
                entry.results = [_copy(x) for _, x in _tensors("", result)]

        return end


def _bound(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Each argument of the schema with its value."""
    for index, argument in enumerate(schema.arguments):
        if index < len(args):
            yield argument, args[index]
        else:
            default = argument.default_value if argument.has_default_value() else None
            yield argument, kwargs.get(argument.name, default)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, element in enumerate(value):
            yield from _tensors(f"{name}[{index}]", element)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _add_of_c10d(
    entry: ExecutedOp, tensors: dict[str, Tensor], op: str, name: str, value: Any, args: tuple[Any, ...]
) -> None:
    """Adds an argument of an op of c10d, if it says what the op does, in a form that all variants share."""
    if isinstance(value, torch.ScriptObject):
        if group := _process_group(value):
            entry.arguments[name] = group.group_name
    elif found := [x for _, x in _tensors("", value)]:
        if not _is_output(op, name, args):
            name = "input" if name.startswith("input") else name
            tensors |= (
                {f"{name}[{k}]": x for k, x in enumerate(found)} if len(found) > 1 else {name: found[0]}
            )
    elif name not in _OF_THE_CALL:
        even = name.endswith("split_sizes") and len(set(value)) <= 1  # may be left out
        entry.arguments[name] = [] if even else _plain(value)


def _process_group(value: Any) -> torch.distributed.ProcessGroup | None:
    try:
        return torch.distributed.ProcessGroup.unbox(value)
    except (RuntimeError, AttributeError, TypeError):
        return None


def _is_output(op: str, argument: str, args: tuple[Any, ...]) -> bool:
    """Does the op of c10d overwrite this argument, or ignore it, without having read it?"""
    if op.startswith("recv") or op == "barrier" or argument.startswith("output"):
        return True
    if op == "broadcast_":
        group = _process_group(args[1])
        return group is not None and group.rank() != args[2]
    return False


def _is_capturing(tensors: dict[str, Tensor]) -> bool:
    return any(x.is_cuda for x in tensors.values()) and torch.cuda.is_current_stream_capturing()


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _copy(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.detach().clone()

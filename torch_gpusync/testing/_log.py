"""The log of gpusync ops that really ran, in eager and in compiled code alike.

It comes from the profiler's record functions, which the dispatcher calls for every op. Compiled code calls
the ops through the dispatcher too (Inductor's generated code as much as a compiled graph that runs op by op),
so nothing that runs is missed and nothing that was removed is seen. A TorchDispatchMode would not do:
torch.compile does not compile under one. The groups' call records know one group each: they lose the order
between groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import profile

# Ops with a kernel of their own; `copy_to_ranks` and `reduce_from_ranks` are traced through.
_KERNELS = (
    *("barrier", "signal", "wait_signal", "pull_start", "pull_end", "push_epoch", "push_exit"),
    *("put", "get", "all_reduce"),
)


@contextmanager
def executed_ops() -> Iterator[list[str]]:
    """Fills the list, on leaving, with an entry per executed op: its name and its numeric arguments."""
    log: list[str] = []
    with profile(record_shapes=True) as profiler:
        yield log
    events = [event for event in profiler.function_events or () if event.name.startswith("gpusync::")]
    # An op's Autograd kernel calls the op again below autograd: only the innermost call did the work.
    outer = set()
    for event in events:
        parent = event.cpu_parent
        while parent is not None:
            outer.add(id(parent))
            parent = parent.cpu_parent
    for event in sorted(events, key=lambda e: e.time_range.start):
        name = event.name.removeprefix("gpusync::")
        if name in _KERNELS and id(event) not in outer:
            numbers = [str(value) for value in event.concrete_inputs if value is not None]
            log.append(f"{name}({', '.join(numbers)})")

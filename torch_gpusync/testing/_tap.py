"""Looks at every op of a library as it runs, in eager and in compiled code alike.

The place is the dispatch key BackendSelect: below autograd and all tracing, directly above the kernel, and part of
every call, tensors or none. Inductor's code calls ops through the dispatcher as much as a graph that runs op by op
does, so nothing that runs is missed, and nothing that a compiler has removed is seen. A TorchDispatchMode would not do:
torch.compile does not compile under one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# Called as an op begins, with its overload, arguments and keyword arguments; what it returns is called as the op ends,
# with the result, or None if the op raised.
Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[[Any], None]]

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
# Thread-local, and torch hands it on to the threads of a backward pass.
_OBSERVERS = "torch_gpusync.testing"

# Of this library these are set-up or made of other ops.
_NO_OPS = ("gpusync::copy_to_ranks", "gpusync::reduce_from_ranks")

_lock = threading.Lock()
_installed: dict[str, tuple[torch.library.Library, int]] = {}  # by namespace, with the number of its users


def observers() -> tuple[Observer, ...]:
    """Those of this thread."""
    if not torch._C._is_key_in_tls(_OBSERVERS):
        return ()
    found: tuple[Observer, ...] = torch._C._get_obj_in_tls(_OBSERVERS)
    return found


@contextmanager
def adopt(found: tuple[Observer, ...]) -> Iterator[None]:
    """Makes another thread's observers this thread's, for as long as that one keeps them."""
    before = observers()
    torch._C._stash_obj_in_tls(_OBSERVERS, found)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_OBSERVERS, before)


@contextmanager
def observe(observer: Observer, namespaces: Sequence[str]) -> Iterator[None]:
    """Shows `observer` the ops of `namespaces` that this thread runs, and the backward passes it starts."""
    with ExitStack() as stack:
        for namespace in dict.fromkeys(namespaces):
            stack.enter_context(_installation(namespace))
        stack.enter_context(adopt((*observers(), observer)))
        yield


@contextmanager
def _installation(namespace: str) -> Iterator[None]:
    with _lock:
        library, users = _installed.get(namespace) or (_install(namespace), 0)
        _installed[namespace] = library, users + 1
    try:
        yield
    finally:
        with _lock:
            library, users = _installed.pop(namespace)
            if users > 1:
                _installed[namespace] = library, users - 1
            else:
                library._destroy()


def _install(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::") and _is_communication(name):
            base, _, overload = name.removeprefix(f"{namespace}::").partition(".")
            op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
            library.impl(op, _kernel(op), "BackendSelect", with_keyset=True)
    return library


def _is_communication(name: str) -> bool:
    private = name.startswith("gpusync::_") and name != "gpusync::_all_reduce"
    taken = torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")
    return not private and name not in _NO_OPS and not taken


def _kernel(op: Any) -> Callable[..., Any]:
    def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        found = () if keys.has(torch._C.DispatchKey.Meta) else observers()  # Meta: a compiler at work
        ends = [observer(op, args, kwargs) for observer in found]
        result = None
        try:
            result = op.redispatch(keys & _BELOW, *args, **kwargs)
        finally:
            for end in reversed(ends):
                end(result)
        return result

    return call

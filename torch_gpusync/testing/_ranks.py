"""`@ranks`: a test function that every rank runs."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torch_gpusync.group import SyncGroup
from torch_gpusync.testing._processes import launch
from torch_gpusync.testing._skew import skewed
from torch_gpusync.testing._source import Source, complain_of_place
from torch_gpusync.testing._threads import RankError, run_threads
from torch_gpusync.virtual import virtual_ranks

_PROVIDED = ("sync", "rank", "world_size")
# Seconds of the limit that threads as ranks are not given: their process needs them to report who was stuck.
_TO_REPORT = 2.0

Kind = Literal["processes", "virtual"]


@dataclass(frozen=True)
class _Skipped:
    reason: str


@dataclass(frozen=True)
class _Body:
    """What a rank runs, and how; goes to the ranks by pickle, and finds the function there by its name.

    The name leads to what the decorators have made of it, so the function itself is looked for underneath.
    """

    module: str
    qualname: str
    world_size: int
    kind: Kind
    wanted: tuple[str, ...]  # of _PROVIDED
    skew: Mapping[int, float]
    seed: int
    timeout: float
    device: str
    group: Mapping[str, Any]

    def function(self) -> Callable[..., Any]:
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        while not hasattr(found, "_gpusync_ranks"):  # decorators above @ranks
            found = found.__wrapped__
        return found._gpusync_ranks  # type: ignore[no-any-return]

    def as_process(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        sync = SyncGroup(device=self.device, **self.group) if "sync" in self.wanted else None
        return self._run(rank, sync, args, kwargs)

    def as_threads(self, _: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All ranks, in one process."""
        groups = virtual_ranks(self.world_size, self.device, **self.group) if "sync" in self.wanted else []

        def body(rank: int) -> Any:
            sync = groups[rank] if groups else None
            stream = sync.stream if sync is not None else None
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return self._run(rank, sync, args, kwargs)

        limit = max(self.timeout - _TO_REPORT, 0.5 * self.timeout)
        try:
            results = run_threads(body, self.world_size, timeout=limit)
        except RankError as error:
            printed = "\n".join(Path("/proc/self/fd/1").resolve().read_text().splitlines()[-40:])
            text = f"{error}\n--- last output of all ranks:\n{printed}" if printed else str(error)
            return RankError(text, error.failed, error.stuck)
        return next((x for x in results if isinstance(x, _Skipped)), None)

    def _run(self, rank: int, sync: SyncGroup | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = {"sync": sync, "rank": rank, "world_size": self.world_size}
        provided = {name: values[name] for name in self.wanted}
        with ExitStack() as stack:
            if self.skew.get(rank):
                stack.enter_context(skewed(self.skew[rank], rank, seed=self.seed))
            try:
                self.function()(*args, **provided, **kwargs)
            except BaseException as error:
                if _is_skip(error):
                    return _Skipped(str(error))
                raise
        return None


def ranks(
    n: int,
    kind: Kind = "processes",
    *,
    skew: float | Mapping[int, float] = 0.0,
    seed: int = 0,
    timeout: float = 60.0,
    device: str = "cpu",
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    group_timeout: float | None = None,
    **group: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a test function: every one of ``n`` ranks runs it, and it fails if any of them does.

    The function gets, as far as it has parameters of these names, ``sync`` (the rank's :class:`SyncGroup` of all
    ranks), ``rank`` (a number) and ``world_size``. Its other parameters are pytest's: fixtures and ``parametrize``
    work as usual, with values that can be pickled. It may be a method of a test class. ``pytest.skip`` in it skips the
    test. The decorated function can be called without pytest, too.

    The ranks import the test's module: define the function at its top level, and keep set-up that only pytest should
    do out of it. Asserts are plain ones there, and the traceback shows the line: say in the assert's message what else
    should be seen.

    Args:
        n: how many ranks.
        kind: ``processes``, with a c10d process group each, or ``virtual``: threads of one process (of its own, so that
            it can be ended), which start sooner but share an interpreter.
        skew: make ranks late: the longest sleep, in seconds, before each gpusync op, or a mapping from rank to that. The
            sleeps are drawn from ``seed`` and the rank (:func:`skewed`).
        timeout: seconds for everything; then all ranks are ended, and the error shows where each was.
        device: ``cpu`` or ``cuda``; processes take the GPUs in turn.
        backend: of the process group.
        env: set in the ranks before they import the test's module.
        group_timeout: seconds that a wait of ``sync`` may take; default: half of ``timeout``, so that who waits in vain
            can still say for whom.
        group: further arguments of the ``SyncGroup`` (or of ``virtual_ranks``), such as ``channels``.

    Raises:
        RankError: when the test is called: a rank raised, exited, was killed, or hung.
        TypeError: at once: the function cannot be found by other processes; when the test is called: an argument cannot
            be pickled.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise TypeError(f"ranks(n): the number of ranks must be a whole number from 1, not {n!r}")
    if kind not in ("processes", "virtual"):
        raise TypeError(f"ranks(kind=...): use 'processes' or 'virtual', not {kind!r}")
    lateness = dict(skew) if isinstance(skew, Mapping) else dict.fromkeys(range(n), float(skew))
    group["timeout"] = timeout / 2 if group_timeout is None else group_timeout

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        if why := complain_of_place(fn):
            raise TypeError(
                f"@ranks: every rank imports the test, and {why}: define it at the top level of a module or in a class "
                "there"
            )
        if (
            inspect.iscoroutinefunction(fn)
            or inspect.isasyncgenfunction(fn)
            or inspect.isgeneratorfunction(fn)
        ):
            raise TypeError(
                "@ranks: the test is a coroutine or a generator, whose body no rank would run: write a function"
            )
        signature = inspect.signature(fn)
        wanted = tuple(name for name in _PROVIDED if name in signature.parameters)
        body = _Body(fn.__module__, fn.__qualname__, n, kind, wanted, lateness, seed, timeout, device, group)
        source = Source.of(fn)

        @functools.wraps(fn)
        def test(*args: Any, **kwargs: Any) -> None:
            _check_travel(fn.__qualname__, args, kwargs)
            if kind == "processes":
                results = launch(
                    source, body.as_process, n, (args, kwargs), timeout=timeout, backend=backend, env=env
                )
            else:
                results = _launch_threads(source, body, (args, kwargs), env)
            for result in results:
                if isinstance(result, _Skipped):
                    _skip(result.reason)

        # What pytest reads: all that is left for fixtures and parametrize.
        rest = [p for name, p in signature.parameters.items() if name not in wanted]
        test.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        test._gpusync_ranks = fn  # type: ignore[attr-defined]
        return test

    return decorate


def _launch_threads(
    source: Source, body: _Body, arguments: tuple[Any, ...], env: Mapping[str, str] | None
) -> list[Any]:
    __tracebackhide__ = True
    n = body.world_size
    try:
        [result] = launch(
            source, body.as_threads, 1, arguments, timeout=body.timeout, process_group=False, env=env
        )
    except RankError as error:  # they went down together
        reason = error.failed[0]
        detail = str(error).split("\n", 2)[2].replace("--- rank 0", "--- their process")
        text = f"all {n} ranks failed: their process {reason}\n{detail}"
        raise RankError(text, dict.fromkeys(range(n), reason), range(n) if error.stuck else ()) from None
    if isinstance(result, RankError):
        raise result
    return [result]


def _check_travel(test: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, value in [*((f"number {k}", x) for k, x in enumerate(args)), *kwargs.items()]:
        try:
            pickle.dumps(value)
        except Exception as error:  # whatever a __reduce__ raises
            raise TypeError(
                f"@ranks: argument {name} of {test}, of type {type(value).__name__}, cannot go to the ranks' processes "
                f"by pickle ({type(error).__name__}: {error}): make it in the test, or pass what it is made of"
            ) from None


def _is_skip(error: BaseException) -> bool:
    """Is it what pytest.skip raises? Asked without importing pytest, which need not be there."""
    pytest = sys.modules.get("pytest")
    return pytest is not None and isinstance(error, pytest.skip.Exception)


def _skip(reason: str) -> None:
    import pytest

    pytest.skip(reason)

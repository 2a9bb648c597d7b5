"""What ranks under test share: a side channel that bypasses gpusync, and checks of errors and health."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_gpusync import SyncGroup

E = TypeVar("E", bound=BaseException)


def slack() -> float:
    """What a time that the contract promises is multiplied with before it is called exceeded.

    1 on a machine that has cores for the test; more where others use them, so that what is found then is a
    hang and not a busy machine.
    """
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return 1.0 if busy < 2 else 1 + busy


def tell(key: str, value: str = "yes") -> None:
    """Leave a note for the other ranks, in the store that the test process hosts."""
    dist.distributed_c10d._get_default_store().set(f"test/{key}", value)


def learn(key: str, seconds: float = 30.0) -> str:
    """Wait for another rank's note."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"test/{key}"], timedelta(seconds=seconds))
    return str(store.get(f"test/{key}").decode())


def expect(error: type[E], pattern: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> E:
    """The error that `call` raises: exactly of class `error`, with a text in which `pattern` is found."""
    try:
        result = call(*args, **kwargs)
    except BaseException as raised:
        assert type(raised) is error, f"{type(raised).__name__}({raised}) instead of {error.__name__}"
        assert re.search(pattern, str(raised)), f"'{pattern}' is not in '{raised}'"
        return raised
    raise AssertionError(f"nothing was raised, the result is {result!r}; '{pattern}' was expected")


def timed(call: Callable[..., Any], *args: Any) -> tuple[BaseException | None, float]:
    """What `call` raises, and after how many seconds it ends."""
    start = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def check_health(sync: SyncGroup, salt: int = 0) -> None:
    """Every kind of call once, with data that differ by rank and `salt`: a group out of step fails."""
    n = sync.world_size
    sync.barrier()
    sync.barrier(1, fence=False)
    mine = torch.arange(5, dtype=torch.int64) + 100 * sync.rank + salt
    total = sync.all_reduce(mine)
    assert torch.equal(total, n * torch.arange(5) + 100 * (n * (n - 1) // 2) + n * salt), total
    sync.signal((sync.rank + 1) % n)
    sync.wait_signal((sync.rank - 1) % n)
    sync.pull_start()
    sync.pull_end()
    assert not sync.is_broken


def close_all(ranks: list[SyncGroup]) -> None:
    for sync in ranks:
        sync.close()

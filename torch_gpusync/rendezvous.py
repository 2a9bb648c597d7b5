"""How ranks agree while they set something up: through the process group's own c10d store."""

import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_gpusync.errors import SyncError, SyncTimeoutError


class Deadline:
    """The moment when a set-up call gives up."""

    def __init__(self, seconds: float) -> None:
        self.start = time.monotonic()
        self.seconds = seconds

    @property
    def waited(self) -> float:
        return time.monotonic() - self.start

    @property
    def expired(self) -> bool:
        return self.waited > self.seconds


class Rendezvous:
    """The ranks of one process group, meeting over its store.

    Set-up calls are numbered in the order in which a rank makes them, whatever they are, so that ranks which make
    different ones meet and find out. Keys are removed as soon as every rank has read them.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, global_ranks: Sequence[int], prefix: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.global_ranks = list(global_ranks)
        self._store = store
        self._prefix = prefix
        self._round = 0
        self._last_key: str | None = None

    def exchange(self, value: Any, what: str, group: str, deadline: Deadline) -> list[Any]:
        """Everybody's ``value`` (JSON), by rank. ``what`` and ``group`` are for the error.

        Raises:
            SyncTimeoutError: some ranks had not come at the deadline.
        """
        self._round += 1
        keys = [f"{self._prefix}/{self._round}/{r}" for r in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(value))
        missing = list(range(self.world_size))
        pause = 0.0002
        while True:
            # Polled, not waited for: Ctrl-C has to work, and stores differ in how they bound a wait.
            missing = [r for r in missing if not self._store.check([keys[r]])]
            if not missing:
                break
            if deadline.expired:
                raise self._timeout(what, group, missing, deadline)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        values = [json.loads(self._store.get(key)) for key in keys]
        # Whoever came to this round had read the round before.
        if self._last_key is not None:
            self._store.delete_key(self._last_key)
        self._last_key = keys[self.rank]
        return values

    def agree(self, arguments: dict[str, Any], what: str, group: str, deadline: Deadline) -> None:
        """Check that all ranks make the same set-up call with the same ``arguments``.

        Raises:
            SyncError: they do not, or one of them found its own arguments wrong (key ``"error"``).
        """
        everybody = self.exchange(arguments, what, group, deadline)
        for r, theirs in enumerate(everybody):
            if theirs.get("error"):
                raise SyncError(f"gpusync: {what} of group '{group}' failed on rank {r}: {theirs['error']}")
        for key in sorted({key for theirs in everybody for key in theirs}):
            values = [theirs.get(key) for theirs in everybody]
            if any(value != values[0] for value in values):
                listed = "; ".join(f"rank {r}: {value!r}" for r, value in enumerate(values))
                raise SyncError(
                    f"gpusync: the ranks of group '{group}' disagree on {key} in {what} ({listed}): make the same "
                    "calls with the same arguments, in the same order, on every rank"
                )

    def _timeout(self, what: str, group: str, missing: list[int], deadline: Deadline) -> SyncTimeoutError:
        names = ", ".join(f"rank {r} (global {self.global_ranks[r]})" for r in missing)
        return SyncTimeoutError(
            f"gpusync: {what}(group='{group}') on rank {self.rank} (global {self.global_ranks[self.rank]}) waited "
            f"{deadline.waited:.1f} s for {names}: every rank of the process group has to make this call",
            group=group,
            op=what,
            channel=-1,
            missing_ranks=missing,
            waited_s=deadline.waited,
        )


@dataclass
class _GroupState:
    rendezvous: Rendezvous
    default_names: int = 0


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()


def resolve_group(group: dist.ProcessGroup | DeviceMesh | str | None) -> dist.ProcessGroup:
    """The c10d process group that a user means.

    Raises:
        SyncError: there is none, or this process is not in it.
    """
    if not dist.is_initialized():
        raise SyncError(
            "gpusync: torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first "
            "(under torchrun it needs no more arguments), or use torch_gpusync.virtual_ranks(n) for ranks in one process"
        )
    if group is None:
        resolved = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise SyncError(f"gpusync: a SyncGroup needs a 1-D DeviceMesh, got {group.ndim}-D: pass mesh['dimension']")
        resolved = group.get_group()
    elif isinstance(group, str):
        resolved = dist.distributed_c10d._resolve_process_group(group)
    else:
        resolved = group
    if not isinstance(resolved, dist.ProcessGroup):
        raise SyncError("gpusync: this process is not in the process group: make the SyncGroup on its members only")
    return resolved


def of_group(group: dist.ProcessGroup) -> _GroupState:
    """The state kept for ``group`` as long as it lives."""
    state = _states.get(group)
    if state is None:
        state = _states[group] = _GroupState(
            Rendezvous(
                dist.distributed_c10d._get_process_group_store(group),
                dist.get_rank(group),
                dist.get_world_size(group),
                dist.get_process_group_ranks(group),
                "gpusync",
            )
        )
    return state


def default_name(group: dist.ProcessGroup) -> str:
    """``world`` or the process group's name; ``/1``, ``/2``, ... for the second and later SyncGroups on it.

    Names are constants of compiled graphs, so they are the same on all ranks and in every run.
    """
    state = of_group(group)
    base = "world" if group == dist.group.WORLD else group.group_name
    name = base if state.default_names == 0 else f"{base}/{state.default_names}"
    state.default_names += 1
    return name

"""SymmetricMemory's rendezvous, also between ranks whose processes have made different numbers of them before.

SymmetricMemory numbers its exchanges by a count of the whole process, over all groups, and puts the number into its keys
(``StoreExchange`` in torch's CUDASymmetricMemoryUtils.hpp). In a group of ranks 1 and 2 where rank 1 has been in a group
with rank 0 before, or has used SymmetricMemory on its own, both would wait for keys that nobody will ever set.
"""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_gpusync.rendezvous import Deadline, Rendezvous

# Of a wait: to a store none at all may mean no limit, and what comes next to none is too much for its clock.
_SHORTEST_S, _LONGEST_S = 0.01, 1e6
_names = itertools.count()


class SymmetricStore(dist.Store):
    """The numbers in one rendezvous's keys become 0, 1, 2 ... in the order in which they come: the same on all ranks.

    Args:
        store: of the group's ranks, with nothing in it.
        deadline: for all waits together, whatever the store's own timeout is. Then DistStoreError is raised.
    """

    def __init__(self, store: dist.Store, deadline: Deadline) -> None:
        super().__init__()
        self._store: Any = store
        self._deadline = deadline
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        parts = key.split("/")
        for i, part in enumerate(parts):
            if part.isdigit():
                parts[i] = str(self._numbers.setdefault(part, len(self._numbers)))
                break
        return "/".join(parts)

    # ---- what torch calls, with the names of its binding

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> Any:
        return self._store.add(self._key(key), value)

    def check(self, keys: Sequence[str]) -> Any:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        left = timedelta(
            seconds=min(max(self._deadline.seconds - self._deadline.waited, _SHORTEST_S), _LONGEST_S)
        )
        self._store.wait([self._key(key) for key in keys], min([left, *timeout]))

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._store.compare_set(self._key(key), expected, desired)

    def delete_key(self, key: str) -> Any:
        return self._store.delete_key(self._key(key))


def rendezvous(memory: torch.Tensor, meeting: Rendezvous, deadline: Deadline) -> Any:
    """SymmetricMemory's handle of ``memory``, which every rank of ``meeting`` has allocated. Collective.

    SymmetricMemory finds rank, world size and store by the name of a process group: here it is one of its own, with no
    back end, and no longer there afterwards.
    """
    from torch._C._distributed_c10d import (
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )

    name: Any = f"gpusync/{next(_names)}"
    # Kept here: torch's reference to it does not keep the Python part.
    store = SymmetricStore(meeting.scratch(), deadline)
    group = dist.ProcessGroup(store, meeting.rank, meeting.world_size)
    _register_process_group(name, group)
    try:
        return _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)

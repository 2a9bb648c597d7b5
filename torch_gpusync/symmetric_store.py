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

from torch_gpusync.rendezvous import Rendezvous

_names = itertools.count()


class SymmetricStore(dist.Store):
    """The numbers in one rendezvous's keys become 0, 1, 2 ... in the order in which they come: the same on all ranks.

    Args:
        store: of the group's ranks, with nothing in it.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store: Any = store
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
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> Any:
        return self._store.add(self._key(key), value)

    def check(self, keys: Sequence[str]) -> Any:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._store.compare_set(self._key(key), expected, desired)

    def delete_key(self, key: str) -> Any:
        return self._store.delete_key(self._key(key))


def rendezvous(memory: torch.Tensor, meeting: Rendezvous) -> Any:
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
    store = SymmetricStore(meeting.scratch())  # torch's reference alone does not keep the Python part of it
    group = dist.ProcessGroup(store, meeting.rank, meeting.world_size)
    _register_process_group(name, group)
    try:
        return _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)

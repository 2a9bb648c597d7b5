"""The store through which torch SymmetricMemory makes the ranks of a group meet."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class SymmetricStore(dist.Store):
    """Lets ranks meet whose processes have made different numbers of rendezvous before.

    SymmetricMemory numbers its exchanges by a count of the whole process, over all groups, and puts the number into its
    keys (``StoreExchange`` in torch's CUDASymmetricMemoryUtils.hpp): in a group of ranks 1 and 2 where rank 1 has been in
    another group with rank 0 before, both wait for keys that nobody will ever set. Here the numbers that one rendezvous
    uses become 0, 1, 2 ... in the order in which they come, which is the same on all of its ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = None
        self._numbers: dict[str, int] = {}

    def begin(self, store: dist.Store) -> None:
        """A rendezvous begins. ``store``: of the group's ranks, with nothing in it."""
        self._store, self._numbers = store, {}

    def end(self) -> None:
        """Lets go of the store: SymmetricMemory keeps this object for ever, and must not keep a port open with it."""
        self._store = None

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

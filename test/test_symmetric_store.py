"""SymmetricMemory numbers its exchanges by a count of the process: ranks with different counts have to meet all the same."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from torch_gpusync.symmetric_store import SymmetricStore
from torch_gpusync.testing import run_threads

RANKS, EXCHANGES = 3, 4


def _exchange(store: dist.Store, number: int, rank: int, value: str) -> list[bytes]:
    """What torch's StoreExchange::all_gather does, through its C++ stores."""
    store.set(f"CUDASymmetricMemory/{number}/{rank}", value)
    got: list[bytes] = store.multi_get([f"CUDASymmetricMemory/{number}/{r}" for r in range(RANKS)])
    return got


def _meet(store: dist.Store, rank: int, tag: str, first: int) -> None:
    for k in range(EXCHANGES):
        got = _exchange(store, first + k, rank, f"{tag} {rank} {k}")
        assert got == [f"{tag} {r} {k}".encode() for r in range(RANKS)]


def test_ranks_with_different_counts_meet() -> None:
    shared = dist.HashStore()

    def rank(r: int) -> None:
        mine = SymmetricStore()
        for rendezvous in range(3):
            mine.begin(dist.PrefixStore(f"round {rendezvous}", shared))
            _meet(dist.PrefixStore("torch", mine), r, f"round {rendezvous}", first=100 * r + 9 * rendezvous)
            mine.end()

    run_threads(rank, RANKS, timeout=30)


def test_without_it_they_do_not() -> None:
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=1))

    def rank(r: int) -> None:
        with pytest.raises(dist.DistStoreError):
            _meet(shared, r, "", first=100 * r)

    run_threads(rank, RANKS, timeout=30)


def test_other_operations_go_to_the_same_place() -> None:
    shared, mine = dist.HashStore(), SymmetricStore()
    mine.begin(dist.PrefixStore("place", shared))
    store = dist.PrefixStore("torch", mine)
    assert store.add("barrier/41/num", 2) == 2
    store.set("barrier/41/last", "yes")
    store.wait(["barrier/41/last"])
    assert store.check(["barrier/41/last"]) and not store.check(["barrier/42/last"])
    assert shared.get("place/torch/barrier/0/last") == b"yes"

"""SymmetricMemory numbers its exchanges by a count of the process: ranks with different counts have to meet all the same."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torch_gpusync import symmetric_store
from torch_gpusync.rendezvous import Deadline, Rendezvous
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
        for rendezvous in range(3):
            mine = SymmetricStore(dist.PrefixStore(f"round {rendezvous}", shared), Deadline(float("inf")))
            _meet(dist.PrefixStore("torch", mine), r, f"round {rendezvous}", first=100 * r + 9 * rendezvous)

    run_threads(rank, RANKS, timeout=30)


def test_without_it_they_do_not() -> None:
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=1))

    def rank(r: int) -> None:
        with pytest.raises(dist.DistStoreError):
            _meet(shared, r, "", first=100 * r)

    run_threads(rank, RANKS, timeout=30)


def test_waits_end_at_the_deadline_and_not_when_the_store_would_end_them() -> None:
    shared = dist.HashStore()
    assert shared.timeout > timedelta(seconds=100)

    def rank(r: int) -> None:
        if r == 1:
            return  # lost on its way
        mine = SymmetricStore(shared, Deadline(1))
        store = dist.PrefixStore("torch", mine)
        with pytest.raises(dist.DistStoreError):
            _exchange(store, 0, r, "")
        with pytest.raises(dist.DistStoreError):
            store.wait(["another"])
        with pytest.raises(dist.DistStoreError):
            store.wait(["another"], timedelta(seconds=100))

    run_threads(rank, RANKS, timeout=30)


def test_other_operations_go_to_the_same_place() -> None:
    shared = dist.HashStore()
    mine = SymmetricStore(dist.PrefixStore("place", shared), Deadline(20))
    store = dist.PrefixStore("torch", mine)
    assert store.add("barrier/41/num", 2) == 2
    store.set("barrier/41/last", "yes")
    store.wait(["barrier/41/last"])
    assert store.check(["barrier/41/last"]) and not store.check(["barrier/42/last"])
    assert shared.get("place/torch/barrier/0/last") == b"yes"


def test_a_rendezvous_finds_rank_size_and_store_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's part, which needs GPUs, played by what it does: it asks the process group of that name."""
    shared, numbers = dist.HashStore(), threading.local()

    class Stub:
        @staticmethod
        def rendezvous(memory: torch.Tensor, name: str) -> list[bytes]:
            group = torch._C._distributed_c10d._resolve_process_group(name)
            assert group.size() == RANKS
            store = dist.PrefixStore("torch", group.get_group_store())
            return _exchange(store, numbers.first, group.rank(), str(memory.item()))

    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", Stub)

    def rank(r: int) -> None:
        numbers.first = 10 * r
        meeting = Rendezvous(shared, r, RANKS, range(RANKS), "here")
        got = symmetric_store.rendezvous(torch.tensor(r), meeting, Deadline(20))
        assert got == [b"0", b"1", b"2"]

    run_threads(rank, RANKS, timeout=30)

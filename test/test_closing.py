"""Closing a group and making it again, and leaving in any order, with or without the process group."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rank_tools import check_health, expect, slack

from torch_gpusync import SyncError, SyncGroup, rendezvous
from torch_gpusync.testing import run_ranks


def _close_and_make_again(rank: int) -> None:
    for k in range(10):
        sync = SyncGroup(name="tp", timeout=20.0)
        buffer = sync.buffer("b", (1,), torch.int64)
        assert buffer.get().item() == 0  # nothing of the last one
        buffer.put(torch.tensor([k + 1]))
        check_health(sync, k)
        if k % 2:
            del sync, buffer  # collected
            gc.collect()
        else:
            sync.close()
            sync.close()
            for call in (
                sync.barrier,
                sync.check,
                sync.dump,
                buffer.get,
                partial(getattr, sync, "is_broken"),
                partial(setattr, sync, "timeout", 3.0),
                partial(sync.buffer, "c", (1,), torch.int64),
            ):
                expect(SyncError, "no group 'tp': it was never made here, or it was closed", call)
            assert (sync.name, sync.rank, sync.world_size, sync.timeout) == ("tp", rank, 3, 20.0)


def test_a_closed_group_can_be_made_again_by_its_name() -> None:
    run_ranks(_close_and_make_again, 3)


def _destroyed_first(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)
    buffer = sync.buffer("b", (2,), torch.int64)
    check_health(sync)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    check_health(sync)  # it goes on without
    buffer.put(torch.tensor([rank, 1]))
    expect(
        SyncError,
        r"was destroyed, and the ranks meet through it in buffer\(\)",
        sync.buffer,
        "c",
        (1,),
        torch.int64,
    )
    expect(SyncError, "not initialised", SyncGroup)
    # Another life of the process group on the same store: no key of the last one is taken for one of this.
    for life in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{life}", store), rank=rank, world_size=3)
        again = SyncGroup(name=f"life {life}", timeout=20.0)
        again.buffer("b", (1 + life,), torch.int64)
        check_health(again, life)
        dist.destroy_process_group()
    check_health(sync)
    sync.close()


def test_case_19_the_process_group_is_destroyed_first() -> None:
    run_ranks(_destroyed_first, 3)


def _same_store(rank: int, folder: str) -> None:
    """Two lives of a process group whose keys have the same names."""
    for life in range(3):
        store = dist.FileStore(f"{folder}/gloo{life}", 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)

        shared = dist.FileStore(f"{folder}/shared", 3)
        meeting = rendezvous.Rendezvous(shared, rank, 3, range(3), "gpusync")
        for k in range(5):
            deadline = rendezvous.Deadline(20.0)
            meeting.agree({"call": "x"}, "x", "g", deadline)
            assert meeting.exchange([rank, life, k], "x", "g", deadline) == [[r, life, k] for r in range(3)]
        dist.barrier()
        dist.destroy_process_group()


def test_no_key_of_a_past_life_is_left_to_be_taken_for_a_new_one(tmp_path: Path) -> None:
    run_ranks(_same_store, 3, str(tmp_path), process_group=False)


_EXITING = """
import sys, time
import torch, torch.distributed as dist
import torch_gpusync
from torch_gpusync import SyncGroup

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
sync = SyncGroup(timeout=30.0)
buffer = sync.buffer("b", (3,), torch.float32)
virtual = torch_gpusync.virtual_ranks(2)
cycle = [sync]
cycle.append(cycle)
sync.barrier()
if rank == 0:
    dist.destroy_process_group()
    sync.barrier()
elif rank == 1:
    sync.barrier()
    sync.close()
    dist.destroy_process_group()
else:
    time.sleep(0.3)
    sync.barrier()
    sys.modules["keeps it to the very end"] = sync
    del sync
print("done", flush=True)
"""


def test_case_19_leaving_in_any_order(tmp_path: Path) -> None:
    """One destroys the process group first, one closes first, one does neither: all exit with 0."""
    (tmp_path / "exiting.py").write_text(_EXITING)
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "exiting.py"), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "done\n", process.communicate()
        start = time.monotonic()
        for process in processes:
            _, errors = process.communicate(timeout=10 * slack())
            assert process.returncode == 0 and "Exception ignored" not in errors, errors
        assert time.monotonic() - start < 10 * slack()
    finally:
        for process in processes:
            process.kill()

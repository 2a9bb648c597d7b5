"""Making groups: what they are called and who is in them, where ranks meet, and threads that do it at once."""

from __future__ import annotations

import copy
import pickle
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_tools import check_health, expect, learn, slack, tell

from torch_gpusync import SyncError, SyncGroup, SyncTimeoutError, memory, rendezvous
from torch_gpusync.testing import run_ranks, run_threads

# ---- names and sub-groups


def _names(rank: int) -> list[str]:
    pair = dist.new_group([0, 1])
    mesh = dist.init_device_mesh("cpu", (3,))
    groups = [
        SyncGroup(timeout=timedelta(seconds=20)),
        SyncGroup(dist.group.WORLD, timeout=20.0),
        SyncGroup(name="tp", timeout=20.0),
        SyncGroup(timeout=20.0),
        SyncGroup(mesh, timeout=20.0, name="mesh"),
        SyncGroup(dist.group.WORLD.group_name, timeout=20.0),
    ]
    if rank < 2:
        groups += [SyncGroup(pair, timeout=20.0), SyncGroup(pair.group_name, timeout=20.0)]
        assert [g.name for g in groups[-2:]] == [pair.group_name, f"{pair.group_name}/1"]
    for salt, sync in enumerate(groups):
        check_health(sync, salt)
        assert (sync.rank, sync.device, sync.timeout) == (rank, torch.device("cpu"), 20.0)
        assert sync.token is groups[0].token
    assert repr(groups[2]) == f"SyncGroup('tp', rank={rank}, world_size=3, device=cpu)"
    assert copy.deepcopy({"a": [groups[2]]})["a"][0] is groups[2]
    expect(TypeError, "cannot be pickled: .* Save the model's state_dict", pickle.dumps, groups[2])
    return [sync.name for sync in groups[:6]]


def test_names_are_the_same_everywhere() -> None:
    names = run_ranks(_names, 3)
    assert names == [["world", "world/1", "tp", "world/2", "mesh", "world/3"]] * 3


def _global_ranks_2_and_3(rank: int) -> str:
    group = dist.new_group([2, 3])
    if rank < 2:
        return ""
    sync = SyncGroup(group, name="tp", timeout=20.0)
    assert (sync.rank, sync.world_size) == (rank - 2, 2)
    buffer = sync.buffer("b", (2,), torch.int64)
    buffer.put(torch.tensor([rank, 10 * rank]), rank=1 - sync.rank)
    sync.signal(1 - sync.rank)
    sync.wait_signal(1 - sync.rank)
    assert buffer.get().tolist() == [5 - rank, 50 - 10 * rank]
    assert buffer.get(1).tolist() == [2, 20]
    assert sync.all_reduce(torch.tensor([rank])).item() == 5
    expect(SyncError, "rank 2 is out of range: group 'tp' has ranks 0 to 1", sync.signal, 2)
    check_health(sync)
    if rank == 3:
        learn("failed")
        return ""
    sync.timeout = 0.3
    error = expect(SyncTimeoutError, "rank 0", sync.barrier)
    assert error.missing_ranks == [1]
    tell("failed")
    return str(error)


def test_case_14_a_group_of_global_ranks_2_and_3() -> None:
    text = run_ranks(_global_ranks_2_and_3, 4)[2]
    assert re.search(r"on rank 0 \(global 2, host .*\) waited \d\.\d s for rank 1 \(global 3, host ", text), (
        text
    )


def _two_pairs(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank >= 2:
        learn("0 is done"), learn("1 is done")  # so the first pair did not need us
    sync = SyncGroup(groups[rank // 2], timeout=20.0)
    for salt in range(20):
        check_health(sync, salt)
    tell(f"{rank} is done")


def test_case_13_setting_up_a_sub_group_does_not_wait_for_the_world() -> None:
    run_ranks(_two_pairs, 4, timeout=30)


def _overlapping(rank: int) -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    syncs = {pair: SyncGroup(groups[pair], timeout=20.0) for pair in pairs if rank in pair}
    world = SyncGroup(timeout=20.0)
    for salt in range(30):
        for pair in pairs:
            if rank in pair:
                check_health(syncs[pair], salt)
        check_health(world, salt)


def test_overlapping_groups() -> None:
    run_ranks(_overlapping, 3)


# ---- where the ranks meet, and when


def _stores(rank: int, folder: str) -> None:
    makers: list[Callable[[], dist.Store]] = [lambda: dist.FileStore(f"{folder}/store", 2)]
    for number, make in enumerate(makers):
        dist.init_process_group("gloo", store=make(), rank=rank, world_size=2)
        sync = SyncGroup(name=f"g{number}", timeout=20.0)
        check_health(sync)
        expect(SyncError, "disagree on shape", sync.buffer, "b", (rank + 1,), torch.int8)
        check_health(sync)
        dist.barrier()
        dist.destroy_process_group()


def test_a_file_store_does_as_well(tmp_path: Path) -> None:
    run_ranks(_stores, 2, str(tmp_path), process_group=False)


def _alone(rank: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sync = SyncGroup(timeout=5.0)
    check_health(sync)
    x = torch.tensor([1.0, -2.0])
    y = sync.all_reduce(x)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr()


def test_a_world_of_one() -> None:
    run_ranks(_alone, 1, process_group=False)


def _with_a_uuid(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)
    assert sync.device == torch.device("cpu")
    check_health(sync)


def test_case_21_visible_devices_may_be_named_by_uuid() -> None:
    run_ranks(_with_a_uuid, 2, env={"CUDA_VISIBLE_DEVICES": "GPU-01234567-89ab-cdef-0123-456789abcdef"})


def _signals_at_once(rank: int) -> None:
    """Rank 2 opens its part of the memory late; what its peers have sent there by then is not lost."""
    from torch_gpusync.rendezvous import Rendezvous

    exchange = Rendezvous.exchange

    def without_last(self: Rendezvous, value: Any, *args: Any) -> list[Any]:
        return (
            [] if value is None else exchange(self, value, *args)
        )  # so nobody waits for rank 2 to have opened

    Rendezvous.exchange = without_last  # type: ignore[method-assign]
    share = memory.share

    def late(*args: Any) -> torch.Tensor:
        shared = share(*args)
        time.sleep(0.5 if rank == 2 else 0.0)
        return shared

    memory.share = late
    start = time.monotonic()
    sync = SyncGroup(timeout=20.0)
    assert rank == 2 or time.monotonic() - start < 0.4 * slack()
    for peer in range(3):
        for _ in range(5 + rank):
            sync.signal(peer)
    if rank != 2:
        assert "rank 2 (has not opened the group)" in sync.dump() or slack() > 1
    sync.barrier()
    for peer in range(3):
        for _ in range(5 + peer):
            sync.wait_signal(peer)
    check_health(sync)


def test_case_05_signals_before_a_rank_has_opened_its_part() -> None:
    run_ranks(_signals_at_once, 3)


# ---- threads


def test_groups_made_by_two_threads_at_once_share_the_token() -> None:
    """Two tokens would let a compiler move one group's ops past another's."""
    from torch_gpusync import _token

    for _ in range(20):
        _token._tokens.clear()
        tokens = run_threads(lambda rank: _token.process_token(torch.device("cpu")), 4)
        assert all(token is tokens[0] for token in tokens)


def _its_turn(rank: int) -> None:
    sync = SyncGroup(timeout=0.5)
    meeting = rendezvous.of_group(dist.group.WORLD).rendezvous
    with meeting.turn("buffer", "another", rendezvous.Deadline(5.0)), ThreadPoolExecutor(1) as threads:
        text = "for another set-up call, which another thread of rank"
        threads.submit(expect, SyncError, text, sync.buffer, "c", (1,), torch.int8).result()
    sync.timeout = 20.0
    sync.buffer("c", (1,), torch.int8)
    check_health(sync)


def test_a_set_up_call_waits_for_its_turn_and_no_longer_than_the_timeout() -> None:
    run_ranks(_its_turn, 3)


def _at_once(rank: int) -> None:
    """Two threads of every rank, which nothing orders: calls fail or work, and later ones are not spoilt."""
    sync = SyncGroup(timeout=3.0)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(sync.buffer, f"{name}{rank % 2}", (4,), torch.int64) for name in "ab"]
        for call in calls:
            with suppress(SyncError):
                call.result()
    sync.timeout = 20.0
    sync.buffer("afterwards", (4,), torch.int64)
    check_health(sync)


def test_set_up_calls_that_mix_leave_the_next_ones_alone() -> None:
    run_ranks(_at_once, 3)

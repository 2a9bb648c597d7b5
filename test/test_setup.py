"""Making groups: names, sub-groups, closing and making again, set-up that ends whatever a rank does."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_tools import check_health, expect, learn, slack, tell, timed

from torch_gpusync import SyncError, SyncGroup, SyncTimeoutError, memory, rendezvous
from torch_gpusync.testing import run_ranks, run_threads

TIMEOUT = 1.0
LIMIT = TIMEOUT + 1.0


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


# ---- closing


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
        from torch_gpusync import rendezvous

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


# ---- set-up that does not succeed


def _never_makes_it(rank: int) -> None:
    SyncGroup(name="first", timeout=20.0).barrier()  # all are here
    if rank == 2:
        learn("failed 0"), learn("failed 1")
    else:
        start = time.monotonic()
        error = expect(
            SyncTimeoutError, r"^gpusync: SyncGroup\(group='world'\) on rank ", SyncGroup, timeout=TIMEOUT
        )
        assert TIMEOUT <= time.monotonic() - start < LIMIT * slack()
        assert (error.group, error.op, error.channel, error.missing_ranks) == ("world", "SyncGroup", -1, [2])
        assert re.search(
            r"waited \d\.\d s for rank 2 \(global 2\): every rank of the process group has to", str(error)
        )
        assert TIMEOUT <= error.waited_s < LIMIT * slack()
        tell(f"failed {rank}")
    # All try again. The one that was late takes part in this, and not in what the others have given up.
    sync = SyncGroup(timeout=20.0)
    assert sync.name == "world"
    check_health(sync)
    # The same with a buffer.
    if rank == 0:
        learn("no buffer 1"), learn("no buffer 2")
    else:
        sync.timeout = TIMEOUT
        error = expect(SyncTimeoutError, r"buffer\(group='world'\)", sync.buffer, "b", (2,), torch.float32)
        assert (error.op, error.missing_ranks) == ("buffer", [0])
        sync.timeout = 20.0
        tell(f"no buffer {rank}")
    assert sync.buffer("b", (2,), torch.float32).get().tolist() == [0.0, 0.0]
    assert not sync.is_broken
    check_health(sync)


def test_a_rank_that_does_not_make_the_group_in_time() -> None:
    run_ranks(_never_makes_it, 3)


def _comes_when_the_others_have_left(rank: int) -> None:
    SyncGroup(name="first", timeout=20.0).barrier()
    if rank != 2:
        expect(SyncTimeoutError, "rank 2", SyncGroup, timeout=0.3)
        tell(f"failed {rank}")
        learn("failed 2")
    else:
        learn("failed 0"), learn("failed 1")
        error, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [0, 1]
        assert TIMEOUT <= seconds < LIMIT * slack()
        assert re.search(r"\(rank [01] has given up an earlier one\)", str(error)), error
        tell("failed 2")
    check_health(SyncGroup(timeout=20.0))


def test_a_rank_that_comes_when_the_others_have_left() -> None:
    run_ranks(_comes_when_the_others_have_left, 3)


def _leaves_halfway(rank: int, how: str, step: int) -> None:
    """Rank 2 dies or stops between two rounds of the set-up."""
    from torch_gpusync.rendezvous import Rendezvous

    SyncGroup(name="first", timeout=20.0).barrier()  # all are here
    open_before = _open_things()
    if rank == 2:
        meet, rounds = Rendezvous._meet, iter(range(100))

        def stop_at_step(self: Rendezvous, *args: Any) -> Any:
            if next(rounds) == step:
                tell("pid", str(os.getpid()))
                # To this thread: another one may take a signal to the process, and this one run on meanwhile.
                signal.pthread_kill(
                    threading.get_ident(), signal.SIGKILL if how == "dies" else signal.SIGSTOP
                )
            return meet(self, *args)

        Rendezvous._meet = stop_at_step  # type: ignore[method-assign]
        error, seconds = timed(lambda: SyncGroup(timeout=60.0))
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [2], error
        assert "stopped because rank" in str(error)
    else:
        error, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
        assert isinstance(error, SyncTimeoutError) and error.missing_ranks == [2], error
        assert seconds < LIMIT * slack()
        tell(f"failed {rank}")
        if rank == 0 and how == "stops":
            learn("failed 1")
            os.kill(int(learn("pid")), signal.SIGCONT)
    assert str(error) and _open_things() == open_before
    if how == "stops":
        check_health(SyncGroup(timeout=20.0))


def _open_things() -> list[str]:
    """What a set-up that failed could leave: mappings, files, open names."""
    gc.collect()
    maps = [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gpusync" in line
    ]
    files = [str(os.readlink(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    return [m for m in maps if "memfd" in m or "shm" in m] + [f for f in files if "gpusync" in f]


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize(
    ("how", "step"), [("dies", 0), ("dies", 2), ("dies", 4), ("stops", 1), ("stops", 3), ("stops", 4)]
)
def test_a_rank_that_leaves_halfway(how: str, step: int) -> None:
    run_ranks(_leaves_halfway, 3, how, step, lost=(2,) if how == "dies" else ())


def _hosts_the_store(rank: int, how: str, address: str) -> None:
    """Rank 0 hosts the process group's store, as it does without torchrun, and then does not answer."""
    port = Path(address)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (port.parent / "new").write_text(f"{store.port}")
        (port.parent / "new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    number = int(port.read_text())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", number, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    SyncGroup(timeout=20.0).barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return
    time.sleep(0.3)
    error, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
    assert type(error) is SyncError and seconds < LIMIT * slack(), (error, seconds)
    if how == "dies":
        assert "the process group's store does not answer: has the process that hosts it" in str(error)
    else:
        assert "store has not answered in 1.0 s: is the process that hosts it (global rank 0, or " in str(
            error
        )
        again, seconds = timed(lambda: SyncGroup(timeout=TIMEOUT))
        assert type(again) is SyncError and seconds < LIMIT * slack(), (again, seconds)
    # The test process waits for these ranks before it ends rank 0.


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_store_that_does_not_answer(how: str, tmp_path: Path) -> None:
    run_ranks(_hosts_the_store, 3, how, str(tmp_path / "port"), process_group=False, lost=(0,))


def _broken_meanwhile(rank: int) -> None:
    """A rank that waits in buffer() hears that the group has broken."""
    sync = SyncGroup(timeout=30.0)
    if rank == 0:
        error, seconds = timed(lambda: sync.buffer("b", (2,), torch.float32))
        assert isinstance(error, SyncTimeoutError) and (error.op, error.missing_ranks) == ("barrier", [0])
        assert seconds < 5.0 * slack()
        tell("heard")
    else:
        time.sleep(0.2)
        sync.timeout = 0.3
        expect(SyncTimeoutError, "rank 0", sync.barrier)
        expect(SyncTimeoutError, "rank 0", sync.buffer, "b", (2,), torch.float32)
        learn("heard")  # else another set-up call may come between, which rank 0 would take its own for
    sync.close()
    check_health(SyncGroup(name="again", timeout=20.0))


def test_a_group_that_breaks_while_a_rank_sets_up_a_buffer() -> None:
    run_ranks(_broken_meanwhile, 3)


def _one_rank_fails_on_its_own(rank: int) -> None:
    """An error that only one rank meets, in the middle of the set-up, is told to all, who can try again."""
    real = memory._map
    if rank == 1:

        def refuse(*args: Any) -> Any:
            raise OSError("no more mappings")

        memory._map = refuse
    expect(SyncError, "cannot map one another's memory .*rank 1: no more mappings", SyncGroup, timeout=20.0)
    memory._map = real
    check_health(SyncGroup(timeout=20.0))


def test_an_error_of_one_rank_is_told_to_all() -> None:
    run_ranks(_one_rank_fails_on_its_own, 3)


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

"""Bad input gets an error that says what to do, and changes nothing: the group goes on on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_tools import check_health, expect

from torch_gpusync import SyncError, SyncGroup
from torch_gpusync.testing import run_ranks

Bad = tuple[Callable[[SyncGroup], Any], str]


def _ops(name: str) -> Any:
    return getattr(torch.ops.gpusync, name)


# Each with what its message must say. World size 3, 8 channels, buffer "b" of 12 float32.
BAD_CALLS: list[Bad] = [
    *[
        (
            call,
            rf"channel {channel} is out of range: group 'world' has channels 0 to 7 \(SyncGroup\(channels=",
        )
        for channel in (-1, 8, 1 << 40)
        for call in (
            lambda s, c=channel: s.barrier(c),
            lambda s, c=channel: s.barrier(c, fence=False),
            lambda s, c=channel: s.signal(0, c),
            lambda s, c=channel: s.wait_signal(0, c),
            lambda s, c=channel: s.pull_start(c),
            lambda s, c=channel: s.pull_end(c),
            lambda s, c=channel: s.push_epoch(c),
            lambda s, c=channel: s.push_exit(c),
        )
    ],
    *[
        (call, rf"rank {rank} is out of range: group 'world' has ranks 0 to 2 \(ranks are ranks in the group")
        for rank in (-2, 3, 1 << 40)
        for call in (
            lambda s, r=rank: s.signal(r),
            lambda s, r=rank: s.wait_signal(r),
            lambda s, r=rank: s.test_buffer.put(torch.ones(1), r),
            lambda s, r=rank: s.test_buffer.get(r),
        )
    ],
    (lambda s: s.signal(-1), "rank -1 is out of range"),
    (lambda s: s.wait_signal(-1), "rank -1 is out of range"),
    (
        lambda s: s.test_buffer.put(torch.ones(13)),
        r"put of 13 elements at offset 0 does not fit buffer 'b' of 12 el",
    ),
    (lambda s: s.test_buffer.put(torch.ones(2), offset=11), "put of 2 elements at offset 11 does not fit"),
    (lambda s: s.test_buffer.put(torch.ones(1), offset=-1), "at offset -1 does not fit"),
    (lambda s: s.test_buffer.put(torch.ones(0), offset=13), "at offset 13 does not fit"),
    (lambda s: s.test_buffer.put(torch.ones(1), offset=(1 << 63) - 1), "does not fit"),
    (
        lambda s: s.test_buffer.put(torch.ones(2, dtype=torch.float64)),
        r"'b' needs the buffer's dtype: convert with ",
    ),
    (lambda s: s.test_buffer.put(torch.ones(2, dtype=torch.int32)), "needs the buffer's dtype"),
    (
        lambda s: s.test_buffer.put(torch.ones(2, device="meta")),
        "on 'meta' and the token .* on 'cpu': move one",
    ),
    (lambda s: s.test_buffer.get(size=(13,)), "get of 13 elements at offset 0 does not fit"),
    (lambda s: s.test_buffer.get(offset=1), "get of 12 elements at offset 1 does not fit"),
    (lambda s: s.test_buffer.get(size=(1,), offset=-1), "does not fit"),
    (lambda s: s.test_buffer.get(size=(-3,)), "get needs sizes of zero or more"),
    (lambda s: s.test_buffer.get(size=(1 << 62,)), "does not fit"),
    (lambda s: s.test_buffer.get(size=(1 << 40, 1 << 40)), "does not fit"),
    (
        lambda s: s.all_reduce(torch.ones(2, dtype=torch.int8)),
        "takes float32, float64, float16.* int64: convert x",
    ),
    (lambda s: s.all_reduce(torch.ones(2, dtype=torch.bool)), "convert x"),
    (lambda s: s.all_reduce(torch.ones(2, dtype=torch.complex64)), "convert x"),
    (lambda s: s.all_reduce(torch.ones(2, dtype=torch.float8_e5m2)), "convert x"),
    (lambda s: s.all_reduce(torch.ones(2), "mean"), "unknown reduce_op 'mean': use 'sum', 'max'"),
    (lambda s: s.all_reduce(torch.ones(0), "SUM"), "unknown reduce_op 'SUM'"),
    (
        lambda s: s.all_reduce(torch.ones(2), algo="ring"),
        "unknown algo 'ring'.*: use 'auto'.* 'pull_one_shot'",
    ),
    (lambda s: s.all_reduce(torch.ones(2), algo=""), "unknown algo ''"),
    (lambda s: s.all_reduce(torch.ones(2, device="meta")), "on 'meta' and the token .* on 'cpu': move one"),
    (lambda s: setattr(s, "timeout", 0), "timeout must be positive, got 0"),
    (lambda s: setattr(s, "timeout", float("nan")), "timeout must be positive"),
    (lambda s: setattr(s, "timeout", "soon"), "timeout must be seconds or a timedelta, got 'soon'"),
]

# From torch.ops the same texts come as RuntimeError.
BAD_OPS: list[Bad] = [
    (
        lambda s: _ops("barrier")(s.token, "nobody"),
        r"no group 'nobody': it was never made here, or it was closed",
    ),
    (
        lambda s: _ops("put")(s.token, s.name, "c", torch.ones(1)),
        r"no buffer 'c' \(it has 'b'\): make it with sync.buf",
    ),
    (lambda s: _ops("get")(s.token, s.name, "c", -1, [1]), r"no buffer 'c' \(it has 'b'\): make it with"),
    (lambda s: _ops("barrier")(torch.zeros(1), s.name), r"must be the group's ordering token \(sync.token\)"),
    (
        lambda s: _ops("barrier")(torch.zeros(0, dtype=torch.int32), s.name),
        r"must be the group's ordering token",
    ),
    (lambda s: _ops("get")(torch.zeros(1), s.name, "b"), r"must be the group's ordering token"),
    (
        lambda s: _ops("put")(torch.zeros(1), s.name, "b", torch.ones(1)),
        r"must be the group's ordering token",
    ),
    (
        lambda s: _ops("all_reduce")(torch.zeros(1), s.name, torch.ones(1)),
        r"must be the group's ordering token",
    ),
    (
        lambda s: _ops("get")(s.token, s.name, "b", dtype=torch.int32),
        "expects another dtype than the buffer has",
    ),
]


def _bad_calls(rank: int) -> None:
    sync: Any = SyncGroup(timeout=20.0)
    sync.test_buffer = sync.buffer("b", (3, 4), torch.float32)
    filled = torch.arange(12.0).view(3, 4) + 100 * rank
    sync.test_buffer.put(filled)
    for number, (call, pattern) in enumerate(BAD_CALLS + BAD_OPS):
        error = SyncError if number < len(BAD_CALLS) else RuntimeError
        calls = torch.ops.gpusync._calls(sync.name)
        # In turn: on all ranks, and on one rank only.
        if number % 4 == 0 or rank == number % 4 - 1:
            expect(error, pattern, call, sync)
        assert (torch.ops.gpusync._calls(sync.name), sync.is_broken) == (calls, False), pattern
        check_health(sync, number)
    assert torch.equal(sync.test_buffer.get(), filled) and sync.timeout == 20.0
    # The last ones that are in range.
    sync.barrier(7)
    sync.signal(2, 7)
    if rank == 2:
        for src in range(3):
            sync.wait_signal(src, 7)
    sync.pull_start(7), sync.pull_end(7)
    sync.push_epoch(7), sync.push_exit(7)
    sync.test_buffer.put(torch.ones(1), 2, 11)
    sync.barrier()
    assert sync.test_buffer.get(2, (1,), 11).item() == 1.0
    assert sync.test_buffer.get(2, (0,), 12).numel() == 0
    check_health(sync)


def test_case_27_bad_calls_change_nothing() -> None:
    run_ranks(_bad_calls, 3)


def _bad_buffers(rank: int) -> None:
    sync = SyncGroup(timeout=20.0)
    sync.buffer("b", (3,), torch.float32)
    shapes: Sequence[tuple[Any, Any, Any, str]] = [
        ("b", (3,), torch.float32, "already has a buffer 'b': choose another name"),
        ("c", (2, -1), torch.float32, r"shape must not have negative sizes, got \[2, -1\]"),
        ("c", 5, torch.float32, "shape must be a sequence of whole numbers, not 5"),
        ("c", (1.5,), torch.float32, "shape must be a sequence of whole numbers"),
        ("c", (2,), "float32", "dtype must be a torch.dtype"),
        ("c", (2,), torch.qint8, "dtype must be a torch.dtype and not a quantized one"),
        ("", (2,), torch.float32, "name must be a string that is not empty"),
        (7, (2,), torch.float32, "name must be a string that is not empty, not 7"),
    ]
    for number, (name, shape, dtype, pattern) in enumerate(shapes):
        expect(SyncError, pattern, sync.buffer, name, shape, dtype)
        # On one rank only: it is told, and so are the others, at once.
        if rank == number % 3:
            expect(SyncError, f"^gpusync: buffer '{name}': .*{pattern}", sync.buffer, name, shape, dtype)
        else:
            expect(
                SyncError, f"failed on rank {number % 3}: .*{pattern}", sync.buffer, "d", (3,), torch.float32
            )
        check_health(sync, number)
    odd = rank == 1
    for arguments, key in [
        (("e" if odd else "f", (2,), torch.float32), "buffer"),
        (("e", (2, 3) if odd else (3, 2), torch.float32), "shape"),
        (("e", (2,), torch.int32 if odd else torch.float32), "dtype"),
    ]:
        values = r"\(rank 0: (.*); rank 1: (?!\1;).*; rank 2: \1\)"
        expect(
            SyncError,
            f"the ranks of group 'world' disagree on {key} in buffer {values}",
            sync.buffer,
            *arguments,
        )
    call = sync.buffer if odd else lambda *_: SyncGroup(timeout=20.0)
    expect(SyncError, "disagree on .*: make the same calls", call, "e", (2,), torch.float32)
    # None of it has taken the name, or a default name.
    buffer = sync.buffer("e", (4,), torch.float32)
    buffer.put(torch.full((4,), float(rank)))
    sync.barrier()
    assert buffer.get((rank + 1) % 3).tolist() == [float((rank + 1) % 3)] * 4
    assert SyncGroup(timeout=20.0).name == "world/1"


def test_bad_buffers_change_nothing() -> None:
    run_ranks(_bad_buffers, 3)


BAD_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"channels": 0}, "channels must be a whole number from 1 to 1024, not 0"),
    ({"channels": 1025}, "channels must be"),
    ({"channels": "8"}, "channels must be a whole number from 1 to 1024, not '8'"),
    ({"channels": True}, "channels must be"),
    ({"buffer_bytes": 0}, "buffer_bytes must be a whole number from 1 to"),
    ({"buffer_bytes": -4096}, "buffer_bytes must be"),
    ({"buffer_bytes": 1e6}, "buffer_bytes must be"),
    ({"buffer_bytes": 1 << 60}, "buffer_bytes must be"),
    ({"timeout": 0}, "timeout must be positive"),
    ({"timeout": -1.0}, "timeout must be positive"),
    ({"timeout": None}, "timeout must be seconds or a timedelta"),
    ({"name": ""}, "name must be a string that is not empty"),
    ({"name": 5}, "name must be a string that is not empty, not 5"),
    ({"name": "taken"}, "already has an open group 'taken': close it first or choose another name"),
    ({"device": "meta"}, "device 'meta' has no back end: use 'cpu' or 'cuda'"),
    ({"device": "gpu0"}, "device must be 'cpu', 'cuda' or 'cuda:N', not 'gpu0'"),
]


def _bad_groups(rank: int) -> None:
    taken = SyncGroup(name="taken", timeout=20.0)
    for number, (arguments, pattern) in enumerate(BAD_GROUPS):
        expect(SyncError, pattern, SyncGroup, **({"timeout": 20.0} | arguments))
        if rank == number % 3:
            expect(SyncError, pattern, SyncGroup, **({"timeout": 20.0} | arguments))
        else:
            expect(
                SyncError, f"SyncGroup .*failed on rank {number % 3}: .*{pattern}", SyncGroup, timeout=20.0
            )
    odd = rank == 2
    for arguments, key in [
        ({"name": "x" if odd else "y"}, "name"),
        ({"channels": 7 if odd else 8}, "channels"),
        ({"buffer_bytes": 4096 if odd else 8192}, "buffer_bytes"),
    ]:
        values = r"\(rank 0: (.*); rank 1: \1; rank 2: (?!\1\)).*\)"
        expect(
            SyncError, f"disagree on {key} in SyncGroup {values}: make", SyncGroup, timeout=20.0, **arguments
        )
    # Nothing of it has used up the default name.
    sync = SyncGroup(channels=1024, buffer_bytes=1, timeout=20.0)
    assert sync.name == "world"
    check_health(sync)
    sync.barrier(1023)
    assert sync.all_reduce(torch.ones(3000)).tolist() == [3.0] * 3000  # a byte of staging becomes a page
    check_health(taken)


def test_bad_groups_change_nothing() -> None:
    run_ranks(_bad_groups, 3)


def _bad_process_groups(rank: int) -> None:
    pair = dist.new_group([0, 1])
    everybody = dist.new_group([0, 1, 2])
    expect(SyncError, "there is no process group 'nosuch' here: pass the group itself", SyncGroup, "nosuch")
    expect(SyncError, "group must be a ProcessGroup, a 1-D DeviceMesh or .* not 5", SyncGroup, 5)
    if rank == 2:
        expect(SyncError, "not in the process group: make the SyncGroup on its members only", SyncGroup, pair)
    dist.destroy_process_group(everybody)
    expect(SyncError, "the process group was destroyed", SyncGroup, everybody)
    mesh = dist.init_device_mesh("cpu", (3, 1), mesh_dim_names=("tp", "dp"))
    expect(SyncError, r"1-D DeviceMesh, got 2-D: pass mesh\['dimension'\]", SyncGroup, mesh)
    check_health(SyncGroup(mesh["tp"], timeout=20.0))


def test_bad_process_groups() -> None:
    run_ranks(_bad_process_groups, 3)


def _without_torch_distributed(rank: int) -> None:
    pattern = (
        r"torch.distributed is not initialised: call .*init_process_group\('gloo'\).* or use .*virtual_ranks"
    )
    expect(SyncError, pattern, SyncGroup)
    expect(SyncError, pattern, SyncGroup, "some group")


def test_without_torch_distributed() -> None:
    run_ranks(_without_torch_distributed, 1, process_group=False)


def _too_many_ranks(rank: int) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the back end

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=65)
    expect(SyncError, "a group has at most 64 ranks, not 65: make one for each part", SyncGroup, device="cpu")


def test_more_than_64_ranks() -> None:
    run_ranks(_too_many_ranks, 1, process_group=False)


# ---- hosts


def _two_hosts(rank: int) -> None:
    import torch_gpusync.group as group

    real = group._host
    group._host = lambda: real() | {"name": f"host{rank // 2}"}
    listed = "rank 0 on host0, rank 1 on host0, rank 2 on host1"
    pattern = rf"run on different hosts \({listed}\): .* within one host\. Make one for the ranks of each"
    expect(SyncError, pattern, SyncGroup, name="same", timeout=20.0)
    # The same name after another boot is another host, too.
    group._host = lambda: real() | {"boot": f"boot{rank // 2}"}
    expect(SyncError, "different hosts", SyncGroup, name="same", timeout=20.0)
    group._host = real
    check_health(SyncGroup(name="same", timeout=20.0))


def test_case_24_ranks_on_different_hosts_with_one_name() -> None:
    run_ranks(_two_hosts, 3)

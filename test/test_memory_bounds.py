"""Nothing is written beside the memory that a call is about: margins around it keep their pattern."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_tools import close_all

import torch_gpusync
from torch_gpusync import memory
from torch_gpusync.testing import run_threads

_CANARY = 0xA5
_MARGIN = 8192


@pytest.fixture
def with_canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Every piece of shared memory lies between two margins, filled with a pattern."""
    whole: list[torch.Tensor] = []
    share = memory.share

    def with_margins(rendezvous: Any, nbytes: int, *args: Any) -> torch.Tensor:
        outer = share(rendezvous, nbytes + 2 * _MARGIN, *args)
        outer[:_MARGIN] = _CANARY
        outer[-_MARGIN:] = _CANARY
        whole.append(outer)
        return outer[_MARGIN:-_MARGIN]

    monkeypatch.setattr(memory, "share", with_margins)
    yield whole
    assert whole
    for outer in whole:
        margins = torch.cat([outer[:_MARGIN], outer[-_MARGIN:]])
        assert (margins == _CANARY).all(), (margins != _CANARY).nonzero().tolist()[:10]


@pytest.mark.parametrize(
    ("world_size", "channels", "buffer_bytes"), [(1, 1, 1), (3, 2, 8192), (5, 8, 4096 * 5)]
)
def test_case_27_nothing_is_written_beside_the_pads(
    with_canaries: list[torch.Tensor], world_size: int, channels: int, buffer_bytes: int
) -> None:
    ranks = torch_gpusync.virtual_ranks(
        world_size, channels=channels, buffer_bytes=buffer_bytes, timeout=20.0
    )

    def body(rank: int) -> None:
        sync = ranks[rank]
        last = channels - 1
        for salt in range(4):  # both halves of everything
            for peer in range(world_size):
                sync.signal(peer, last)
            for peer in range(world_size):
                sync.wait_signal(peer, last)
            sync.barrier(last)
            sync.pull_start(last), sync.pull_end(last)
            sync.push_epoch(last), sync.push_exit(last)
            for numel in (1, 511, 512, 513, 1024, 5000):
                x = torch.full((numel,), float(rank + salt), dtype=torch.float64)
                total = float(sum(r + salt for r in range(world_size)))
                assert torch.equal(sync.all_reduce(x), torch.full((numel,), total, dtype=torch.float64))

    run_threads(body, world_size)
    close_all(ranks)


def test_case_23_buffers_of_every_size_and_offset(with_canaries: list[torch.Tensor]) -> None:
    """Parts of odd sizes: what one rank puts does not reach the next one's part, nor what lies between them."""
    ranks = torch_gpusync.virtual_ranks(3, timeout=20.0)

    def body(rank: int) -> None:
        sync = ranks[rank]
        for size in (*range(1, 20), 127, 128, 129, 255, 1000):
            buffer = sync.buffer(f"b{size}", (size,), torch.uint8)
            shared = with_canaries[-1]
            sync.barrier()
            if rank == 0:
                stride = -(-size // 128) * 128
                shared[_MARGIN:-_MARGIN].view(3, stride)[:, size:] = _CANARY
            sync.barrier()
            model = torch.zeros(size, dtype=torch.uint8)
            for offset in range(0, size, max(1, size // 20)):
                data = torch.full((size - offset,), (offset + rank) % 250, dtype=torch.uint8)
                buffer.put(data, offset=offset)
                model[offset:] = data
                assert torch.equal(buffer.get(), model)
            sync.barrier()
            if rank == 0:
                stride = -(-size // 128) * 128
                assert (shared[_MARGIN:-_MARGIN].view(3, stride)[:, size:] == _CANARY).all()
            sync.barrier()

    run_threads(body, 3)
    close_all(ranks)

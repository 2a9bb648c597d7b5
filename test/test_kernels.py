"""Kernels of a user's own: the example of docs/kernels.md compiles, what cannot work is refused, and the page shows what is
compiled here. cuda/test_gpu_kernels.py runs it; test_native.py runs the handle's methods on threads."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest
import torch
from device_code import build_library
from rank_tools import expect
from torch import Tensor

import torch_gpusync
from torch_gpusync import SyncError, SyncGroup
from torch_gpusync.testing import check_order

_HERE = Path(__file__).resolve().parent
_SOURCE = _HERE / "cuda/user_kernel.cu"
sys.path.append(str(_HERE / "cuda"))

import user_kernel  # noqa: E402


@pytest.fixture(scope="module")
def sync() -> Iterator[SyncGroup]:
    [group] = torch_gpusync.virtual_ranks(1, name="kernels", timeout=20)
    yield group
    group.close()


@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_the_example_compiles_and_refuses_what_is_no_handle(architecture: str, tmp_path: Path) -> None:
    library = tmp_path / "libuser.so"
    said = build_library(_SOURCE, architecture, torch_gpusync.include_path(), library)
    frames = [int(size) for size in re.findall(r"(\d+) bytes stack frame", said)]
    assert len(frames) == 2 and max(frames) < 64, f"a handle was copied to local memory: {said}"
    kernels = user_kernel.bind(str(library))
    for wrong in (b"", b"\1\0\0\0", bytes(1096), bytes(5000)):
        error = kernels.launch_sum_rows(wrong, len(wrong), None, None, None, None, 0, 0, 0, None)
        assert re.search(r"device handle of version [01] .*include_path\(\)", error.decode())


def test_the_page_shows_what_is_compiled() -> None:
    page = (_HERE.parent / "docs/kernels.md").read_text()
    shown = {"cuda": _SOURCE.read_text(), "python": (_HERE / "cuda/user_kernel.py").read_text()}
    blocks = re.findall(r"^```(cuda|python)\n(.*?)^```$", page, re.M | re.S)
    assert {language for language, _ in blocks} == set(shown)
    for language, text in blocks:
        assert any(indented in shown[language] for indented in (text, indent(text, "    "))), text


def test_groups_on_the_cpu_have_no_kernels(sync: SyncGroup) -> None:
    buffer = sync.buffer("parts", (3,), torch.float32)
    for refused in (sync.device_handle, buffer.device_pointers):
        expect(SyncError, rf"{refused.__name__}\(\) is for CUDA kernels.*'kernels/0' is on the CPU", refused)
    sync.barrier()


def test_an_op_that_takes_the_token_stays_between_the_ops_around_it(sync: SyncGroup) -> None:
    board = sync.buffer("board", (4,), torch.float32)

    # What stands for a launch of a kernel: it reads and writes shared memory, of which its schema says nothing.
    def launch(x: Tensor, bias: Tensor) -> Tensor:
        board.put(board.get() + x)
        return x + bias

    sum_rows = user_kernel.as_op(launch)

    def step(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        board.put(x)
        sync.barrier()
        y = sum_rows(sync.token, x, bias)
        sync.barrier()
        return board.get(), y

    ops = check_order(step, torch.rand(4), torch.rand(4), fullgraph=True, namespaces=["mine"])
    assert "mine.sum_rows" in [op.name for op in ops]

"""The device code of the library as it was built, all kernels of it: do their waits look at what they wait for?

A slot holds an epoch and, in its upper half, what the peer is doing; a wait compares both. ptxas 13.0 (V13.0.88) has made
kernels for sm_90, of correct PTX, whose polls load the lower half alone and then go on as if the peer had come: wrong data
behind any delay of some milliseconds. Which kernels it meets depends on what else is in them, so all are looked at.
"""

from __future__ import annotations

import functools
import re
import subprocess

import pytest
import torch
from device_code import missing, tool

import torch_gpusync  # noqa: F401  (loads the library)
from torch_gpusync import _library

ARCHITECTURES = ("80", "90", "100")
# In one wait: a first look and the polling loop, in the fast half and in two places of the slow one. Looks that have only to
# tell who is missing may load the epoch alone.
_WHOLE_LOADS = 6


def _dump(what: str, *options: str) -> dict[str, str]:
    """Each kernel's code."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("gpusync::barrier", "CUDA"):
        missing("the library was built without nvcc")
    cuobjdump = tool("cuobjdump")
    if cuobjdump is None:
        missing("cuobjdump is missing (pip install nvidia-cuda-cuobjdump)")
    text = subprocess.run(
        [cuobjdump, what, *options, _library.path()], capture_output=True, text=True, check=True, timeout=200
    ).stdout
    parts = re.split(r"\.entry |\n\s*Function : ", text)[1:]
    return {re.match(r"\w+", part).group(): part for part in parts}  # type: ignore[union-attr]


@functools.cache
def _waits() -> dict[str, int]:
    """Waits for peers in each kernel: in the fast and in the slow half of one there is one acquire each."""
    return {name: code.count("ld.acquire.sys.global.u64") // 2 for name, code in _dump("-ptx").items()}


def _short_of_loads(sass: dict[str, str]) -> list[str]:
    """Kernels in which a wait does not load whole slots."""
    return [
        name
        for name, waits in _waits().items()
        if sass[name].count("LDG.E.64.STRONG.SYS") < _WHOLE_LOADS * waits
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_wait_looks_at_whole_slots(architecture: str) -> None:
    assert sum(waits > 0 for waits in _waits().values()) > 50
    sass = _dump("-sass", "-arch", f"sm_{architecture}")
    assert not _short_of_loads(sass)
    # And it would be noticed: the code that was found, in one kernel.
    victim = next(name for name, waits in _waits().items() if waits == 2)
    sass[victim] = sass[victim].replace("LDG.E.64.STRONG.SYS", "LDG.E.STRONG.SYS", 2)
    assert _short_of_loads(sass) == [victim]

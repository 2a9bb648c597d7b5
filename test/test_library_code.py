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


@functools.cache
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


def _unread_flags(code: str) -> list[str]:
    """Loads of pushed parcels, {data, flag, data, flag} in one, whose flags nothing reads afterwards."""
    lines = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", code)
    found = []
    for i, line in enumerate(lines):
        load = re.search(r"LDG\.E\.128\.STRONG\.SYS R(\d+)", line)
        if load is not None and not all(_is_read(int(load[1]) + offset, lines[i + 1 :]) for offset in (1, 3)):
            found.append(line)
    return found


def _is_read(register: int, lines: list[str]) -> bool:
    """Before it is written again."""
    name = re.compile(rf"\bR{register}\b")
    for line in lines:
        target, *sources = line.split(",")
        if any(name.search(source) for source in sources):
            return True
        if name.search(target):
            return False
    return False


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_flag_of_pushed_data_is_looked_at(architecture: str) -> None:
    sass = _dump("-sass", "-arch", f"sm_{architecture}")
    push = {
        name: code for name, code in sass.items() if re.search("push_(one_shot|copy|rms_norm)_kernel", name)
    }
    assert len(push) == 2 * 15 + 4 * 3 + 3 * 4 and all(
        "LDG.E.128.STRONG.SYS" in code for code in push.values()
    )
    assert not any(_unread_flags(code) for code in push.values())


def test_a_flag_that_is_not_looked_at_is_noticed() -> None:
    code = "/*0010*/ LDG.E.128.STRONG.SYS R4, desc[UR8][R2.64] ; /*0020*/ ISETP.NE.AND P0, PT, R5, R9, PT ;"
    assert _unread_flags(code)
    assert not _unread_flags(code + " /*0030*/ ISETP.NE.OR P0, PT, R7, R8, P0 ;")
    assert _unread_flags(code + " /*0030*/ IMAD.MOV.U32 R7, RZ, RZ, R8 ; /*0040*/ IADD3 R1, R7, R7, RZ ;")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_wait_looks_at_whole_slots(architecture: str) -> None:
    assert sum(waits > 0 for waits in _waits().values()) > 50
    sass = dict(_dump("-sass", "-arch", f"sm_{architecture}"))
    assert not _short_of_loads(sass), "made by ptxas 13.0? another may lay the loops out with fewer loads"
    # And it would be noticed: the code that was found, in one kernel.
    victim = next(name for name, waits in _waits().items() if waits == 2)
    sass[victim] = sass[victim].replace("LDG.E.64.STRONG.SYS", "LDG.E.STRONG.SYS", 2)
    assert _short_of_loads(sass) == [victim]


# row_sum.cuh: the barrier in shared memory is there, and expects its bytes, before another block can send any, and what has
# come is acquired. Nothing else runs this part than GPUs with clusters.
_ROW_SUM = [
    "mbarrier.init.shared::cta.b64",
    "fence.mbarrier_init.release.cluster",
    "mbarrier.arrive.expect_tx.shared::cta.b64",
    "barrier.cluster.arrive.release",
    "barrier.cluster.wait.acquire",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32",
    "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64",
]


def _of_clusters(code: str) -> list[str]:
    return re.findall(r"(?:mbarrier|fence|barrier\.cluster|st\.async)[.:\w]+", code)


def test_blocks_of_a_row_add_up_as_written() -> None:
    kernels = {name: code for name, code in _dump("-ptx").items() if "push_rms_norm_kernel" in name}
    assert len(kernels) == 3 * 4
    for name, code in kernels.items():
        assert _of_clusters(code) == _ROW_SUM, name
        assert _of_clusters(code.replace("arrive.release", "arrive.relaxed")) != _ROW_SUM

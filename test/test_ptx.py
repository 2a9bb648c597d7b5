"""Golden code: what every controller method becomes on the device, instruction by instruction, without a GPU.

PTX is compared exactly: it is what the PTX memory model speaks of. SASS, where the compiler has more freedom, has to keep the
properties that matter: one MEMBAR where a release is promised and none elsewhere, never MEMBAR.SC, nothing strong at a
narrower scope than the system's, the block barriers in their places, no local memory.
"""

from __future__ import annotations

import re
from pathlib import Path

import mutants
import pytest
from device_code import compile_to, disassemble, read_ptx, read_sass
from mutants import Edit

ARCHITECTURES = ("80", "90", "100")

# Kernel of instantiate.cu: its loads, stores, atomics, fences and barriers in the order of the PTX text. Plain accesses go to
# the block's own epoch and counters, and to what the kernel itself writes. A barrier ends in a `bar.red` behind its fast path
# and in another behind the slow one, which compilers put where they like; with this test's wait nothing else is in there.
_SYNC = """
    bar.sync
    ld.global.32
    st.{order}.sys.global.u64
    st.global.32
    ld.relaxed.sys.global.u64
    ld.acquire.sys.global.u64
    bar.red.and.pred
"""
_FENCED = _SYNC.format(order="release")
_RELAXED = _SYNC.format(order="relaxed")
_GIVEN_UP = "bar.red.and.pred\n"
GOLDEN = {
    "semaphore_arrive_fenced": "st.release.sys.global.u64",
    "semaphore_arrive_relaxed": "st.relaxed.sys.global.u64",
    "semaphore_peek": "ld.relaxed.sys.global.u64 st.global.64",
    "semaphore_acquire_from": "ld.acquire.sys.global.u64 st.global.64",
    "pull_start_fenced": _FENCED + _GIVEN_UP,
    "pull_start_relaxed": _RELAXED + _GIVEN_UP,
    "pull_end_fenced": _FENCED + _GIVEN_UP,
    "pull_end_relaxed": _RELAXED + _GIVEN_UP,
    "pull_start_read_end": _FENCED + "ld.global.32 st.global.32" + _RELAXED + _GIVEN_UP + _GIVEN_UP,
    "pull_alone": """
        ld.global.32
        st.release.sys.global.u64
        st.global.32
        ld.relaxed.sys.global.u64
        ld.acquire.sys.global.u64
    """,
    "pull_announce": "st.relaxed.sys.global.u64 st.global.32",
    "signal_send": "bar.sync ld.global.32 st.global.32 st.release.sys.global.u64",
    "signal_wait": """
        bar.sync
        ld.global.32
        ld.relaxed.sys.global.u64
        ld.acquire.sys.global.u64
        st.global.32
        bar.red.and.pred
    """,
    "push_epoch": "ld.global.32 st.global.32",
    "push_call": "ld.global.32 st.global.32",
    "push_exit": "bar.sync ld.global.32 st.global.32",
    "push_exit_all": "bar.sync ld.global.32 st.global.32 ld.global.32 st.global.32",
    "push_exit_unsafe": "ld.global.32 st.global.32",
}
# Another layout of the same: the lanes that do not wait go to the `bar.red` at once, and it may stand before the waiting one's.
OTHER_LAYOUT = {
    "signal_wait": """
        bar.sync
        bar.red.and.pred
        ld.global.32
        ld.relaxed.sys.global.u64
        ld.acquire.sys.global.u64
        st.global.32
    """
}
# With the library's own wait, up to the end of the fast path: the group's status in flight beside the epoch, the same
# arrival, and a first poll before the polling loop.
FAST_PATH = """
    bar.sync
    ld.global.32
    ld.relaxed.sys.global.u32
    st.release.sys.global.u64
    st.global.32
    ld.relaxed.sys.global.u64
    ld.relaxed.sys.global.u64
    ld.acquire.sys.global.u64
    bar.red.and.pred
"""

_MEMORY = "include/gpusync/memory_order.h"
_PULL = "include/gpusync/pull_controller.h"
_SIGNAL = "include/gpusync/signal_controller.h"
# Wrong designs, and one kernel whose code gives each away.
MUTANTS = {
    "gpu_scope_release": (
        "pull_start_fenced",
        Edit(_MEMORY, "st.release.sys.global", "st.release.gpu.global"),
    ),
    "gpu_scope_relaxed": (
        "pull_end_relaxed",
        Edit(_MEMORY, "st.relaxed.sys.global", "st.relaxed.gpu.global"),
    ),
    "gpu_scope_poll": ("pull_start_fenced", Edit(_MEMORY, "ld.relaxed.sys.global", "ld.relaxed.gpu.global")),
    "gpu_scope_acquire": ("signal_wait", Edit(_MEMORY, "ld.acquire.sys.global", "ld.acquire.gpu.global")),
    "relaxed_publish": ("signal_send", Edit(_MEMORY, "st.release.sys.global", "st.relaxed.sys.global")),
    "relaxed_acquire": ("pull_start_fenced", Edit(_MEMORY, "ld.acquire.sys.global", "ld.relaxed.sys.global")),
    "volatile_poll": ("semaphore_peek", Edit(_MEMORY, "ld.relaxed.sys.global", "ld.volatile.global")),
    "no_acquire": ("signal_wait", Edit(_MEMORY, "ld.acquire.sys.global.u64 %0, [%1];", "mov.u64 %0, %1;")),
    "full_fence": (
        "semaphore_arrive_fenced",
        Edit(_MEMORY, '"st.release.sys.global.u64', '"fence.sc.sys; st.release.sys.global.u64'),
    ),
    "no_leading_block_barrier": ("pull_start_fenced", Edit(_PULL, "    Scope::barrier();\n", "")),
    "no_trailing_block_barrier": (
        "pull_start_read_end",
        Edit(_PULL, "if (Scope::barrier_and(complete)) [[likely]]", "if (complete) [[likely]]"),
    ),
    "signal_without_block_barrier": (
        "signal_send",
        Edit(
            _SIGNAL, "    block::barrier();\n    if (block::lane() != 0 ||", "    if (block::lane() != 0 ||"
        ),
    ),
    "controller_in_local_memory": (
        "pull_start_fenced",
        Edit(
            _PULL,
            "return m_rows[rank][index * kStages + (kStart ? 0 : 1)];",
            "Semaphore* rows[kMaxRanks];\n"
            "    for (uint32_t r = 0; r < m_world_size; ++r) rows[r] = m_rows[r];\n"
            "    return rows[rank][index * kStages + (kStart ? 0 : 1)];",
        ),
    ),
}


def _in_order(instructions: list[str]) -> list[str]:
    """Without the slow path's `bar.red`, wherever it was put behind another one."""
    bar = "bar.red.and.pred"
    return [i for n, i in enumerate(instructions) if i != bar or n == 0 or instructions[n - 1] != bar]


def is_golden(name: str, found: list[str]) -> bool:
    layouts = [golden[name].split() for golden in (GOLDEN, OTHER_LAYOUT) if name in golden]
    return any(_in_order(found) == _in_order(one) and sorted(found) == sorted(one) for one in layouts)


def check_ptx(kernels: dict[str, list[str]]) -> None:
    assert kernels.keys() == {*GOLDEN, "pull_device_wait"}
    for name in GOLDEN:
        assert is_golden(name, kernels[name]), f"{name}: {kernels[name]}"
    end = kernels["pull_device_wait"].index("bar.red.and.pred") + 1
    assert kernels["pull_device_wait"][:end] == FAST_PATH.split()
    for instruction in (i for kernel in kernels.values() for i in kernel):
        # Whatever is no plain access has the system's scope (volatile has it too), and nothing is a fence.
        ordered = re.search(r"\.(relaxed|acquire|release|acq_rel|sc|weak|mmio)\b", instruction)
        assert not instruction.startswith(("fence", "membar")), instruction
        assert not ordered or ".sys." in instruction, instruction
        assert ordered or not instruction.startswith(("atom", "red")), instruction


def check_sass(kernels: dict[str, list[str]]) -> None:
    assert kernels.keys() == {*GOLDEN, "pull_device_wait"}
    for name, code in kernels.items():
        assert not [i for i in code if i.startswith(("LDL", "STL"))], f"{name} uses local memory"
        strong = [i for i in code if ".STRONG" in i or i.startswith(("MEMBAR", "ATOM", "RED."))]
        assert all(".SYS" in i and ".SC" not in i for i in strong), f"{name}: {strong}"
        memory = [i for i in code if i.startswith(("MEMBAR", "LDG", "STG", "LD.", "ST.", "CCTL", "BAR"))]
        if name == "pull_device_wait":  # the fast path: the rest is laid out behind it
            memory = memory[: next(n for n, i in enumerate(memory) if i.startswith("BAR.RED")) + 1]
            golden = FAST_PATH.split()
        else:
            golden = GOLDEN[name].split()

        def count(prefix: str, code: list[str] = memory) -> int:
            return sum(i.startswith(prefix) for i in code)

        releases = [i for i in golden if "release" in i]
        assert count("MEMBAR.ALL.SYS") == count("MEMBAR") == len(releases), f"{name}: {memory}"
        # A barrier of the block for each in the PTX; before the arrival and after the wait.
        assert count("BAR") == sum(i.startswith("bar") for i in golden), f"{name}: {memory}"
        if "bar.sync" in golden:
            assert memory[0].startswith("BAR.SYNC"), f"{name}: {memory}"
        # The arrival comes right behind the MEMBAR; an acquire drops what the first-level cache holds.
        stores = [n for n, i in enumerate(memory) if i.startswith("STG.E.64.STRONG")]
        assert len(stores) == sum(i.startswith("st.re") for i in golden), f"{name}: {memory}"
        for n, i in enumerate(memory):
            assert not i.startswith("MEMBAR") or n + 1 in stores, f"{name}: {memory}"
        acquires = sum(i.startswith("ld.acquire") for i in golden)
        assert count("CCTL.IVALL") == acquires, f"{name}: {memory}"
        assert (count("LDG.E.64.STRONG") > 0) == any(
            "ld.relaxed.sys" in i or "ld.acquire" in i for i in golden
        ), f"{name}: {memory}"


def check_stack(said: str) -> None:
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(frames) == len(GOLDEN) + 1, said
    assert {number for frame in frames for number in frame} == {"0"}, said


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_03_ptx(architecture: str, tmp_path: Path) -> None:
    output = tmp_path / "code.ptx"
    compile_to(architecture, mutants.CSRC, output)
    check_ptx(read_ptx(output.read_text()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_03_sass(architecture: str, tmp_path: Path) -> None:
    output = tmp_path / "code.cubin"
    check_stack(compile_to(architecture, mutants.CSRC, output))
    check_sass(read_sass(disassemble(output)))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(name: str, tmp_path: Path) -> None:
    kernel, edit = MUTANTS[name]
    csrc = mutants.copy((edit,), tmp_path / "csrc")
    if name == "controller_in_local_memory":
        said = compile_to("90", csrc, tmp_path / "code.cubin")
        with pytest.raises(AssertionError):
            check_stack(said)
        with pytest.raises(AssertionError, match="local memory"):
            check_sass(read_sass(disassemble(tmp_path / "code.cubin")))
        return
    output = tmp_path / "code.ptx"
    compile_to("90", csrc, output)
    with pytest.raises(AssertionError):
        check_ptx(read_ptx(output.read_text()))
    found = read_ptx(output.read_text())[kernel]
    assert not is_golden(kernel, found), f"{kernel} does not give {name} away: {found}"

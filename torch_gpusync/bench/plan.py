"""What one run measures, as it travels to the ranks."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from .timing import Sampling

EXCHANGES = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
OPS = ("barrier", "all_reduce", *EXCHANGES, "decode")  # decode: on GPUs only
MODES = ("eager", "compile")


@dataclass(frozen=True)
class Case:
    """An op and the bytes that each rank gives to it."""

    op: str
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.op} {human(self.nbytes)}" if self.nbytes else self.op


@dataclass(frozen=True)
class Plan:
    """The cases, how they are sampled, and the modes that gpusync is called in (on CPUs). ``nccl_symmetric``: NCCL's
    all-reduce is measured on memory registered for its symmetric kernels, too (on GPUs)."""

    cases: tuple[Case, ...]
    sampling: Sampling
    modes: tuple[str, ...] = ("eager",)
    nccl_symmetric: bool = False


def human(nbytes: int) -> str:
    """For example ``64 KiB``."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def parse_bytes(text: str) -> int:
    """``4096``, ``4K`` or ``1M`` as bytes. Raises ValueError."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    factor = units.get(text[-1:].upper(), 1)
    return int(text[:-1] if factor > 1 else text) * factor


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """The facts without which figures mean nothing, in one line."""
    try:
        models = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
        ]
        model = models[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        model = platform.processor() or platform.machine()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"{cores()} cores ({model}), load average {load}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def gpus() -> str:
    """The GPUs and their driver, by nvidia-smi: torch would make a context, and MPS comes before that."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"GPUs unknown ({error})"
    return "; ".join(f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines))

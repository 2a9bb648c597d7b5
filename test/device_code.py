"""Compiles cuda/instantiate.cu and reads the code, for test_ptx.py; and libraries of kernels."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NoReturn

import pytest

SOURCE = Path(__file__).resolve().parent / "cuda" / "instantiate.cu"


def missing(what: str) -> NoReturn:
    """Skips, but fails where the tools have to be there."""
    if os.environ.get("GPUSYNC_REQUIRE_NVCC") == "1":
        pytest.fail(f"{what}, and GPUSYNC_REQUIRE_NVCC=1")
    pytest.skip(what)


def tool(name: str, variable: str = "") -> str | None:
    """On PATH, in the environment variable, or where PyPI's packages put it."""
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    return os.environ.get(variable) or shutil.which(name) or shutil.which(name, path=packaged)


@functools.cache
def _known_architectures(nvcc: str) -> frozenset[str]:
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, timeout=60)
    return frozenset(re.findall(r"sm_(\d+)", listed.stdout))


def _nvcc(architecture: str) -> str:
    found = tool("nvcc", "CUDACXX")
    if found is None:
        missing("nvcc is missing")
    if architecture not in _known_architectures(found):
        missing(f"this nvcc does not know sm_{architecture}")
    return found


def compile_to(architecture: str, csrc: Path, output: Path) -> str:
    """PTX or a cubin, by the name of the output; returns what the assembler said."""
    command = [_nvcc(architecture), "-std=c++20", f"-arch=sm_{architecture}", "-Xptxas=-v"]
    command += [f"-I{csrc / 'include'}", f"-{output.suffix[1:]}", str(SOURCE), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


def build_library(source: Path, architecture: str, include: str, output: Path) -> str:
    """A shared library of kernels for sm_`architecture`; returns what the assembler said."""
    command = [_nvcc(architecture), "-std=c++20", "-shared", f"-arch=sm_{architecture}", "-cudart", "static"]
    command += ["-Xcompiler", "-fPIC,-Wall,-Wextra", "-Werror=all-warnings", "-Xptxas=-v"]
    done = subprocess.run(
        [*command, "-I", include, str(source), "-o", str(output)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def disassemble(cubin: Path) -> str:
    nvdisasm = tool("nvdisasm")
    if nvdisasm is None:
        missing("nvdisasm is missing (pip install nvidia-cuda-nvdisasm)")
    return subprocess.run(
        [nvdisasm, "-c", cubin], capture_output=True, text=True, check=True, timeout=100
    ).stdout


def read_ptx(text: str) -> dict[str, list[str]]:
    """For each kernel the instructions that touch memory (but parameters) or order it."""
    kernels: dict[str, list[str]] = {}
    for part in re.split(r"\.visible \.entry ", text)[1:]:
        name = re.match(r"\w+", part)
        assert name is not None
        found = re.findall(
            r"^\s*(?:@!?%p\d+\s+)?((?:ld|st|atom|red|fence|membar|bar|barrier)\.[\w.:]+)", part, re.M
        )
        # The type of a plain access is the compiler's choice (u32, b32), its size is not.
        found = [re.sub(r"^((?:ld|st)\.global)\.[a-z](\d+)$", r"\1.\2", i) for i in found]
        kernels[name[0]] = [i for i in found if not re.match(r"(ld|st)\.param", i)]
    return kernels


def read_sass(text: str) -> dict[str, list[str]]:
    kernels: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\.text\.(\w+):", line.strip()):
            current = kernels.setdefault(label[1], [])
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]+)", line):
            current.append(found[1])
    return kernels

"""compute-sanitizer over every op, and the proof that it would report a bug."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 150.0  # seconds for all of them, side by side
_PROGRAM = str(Path(__file__).parent / "sanitized.py")
# Allocations of their own size, so that a byte beyond one is outside. (Only with one rank: freeing one waits for the GPU.)
_EXACT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
RUNS: dict[str, tuple[str, str, dict[str, str]]] = {
    "memcheck, exact": ("memcheck", "1", _EXACT),
    "memcheck, seeded bug": ("memcheck", "seeded", _EXACT),
    "memcheck": ("memcheck", "3", {}),
    # It looks at shared memory. With several ranks' kernels at a time it loses track of launches, and says so as an error.
    "racecheck": ("racecheck", "1", {}),
    "synccheck": ("synccheck", "3", {}),
}


def _command() -> list[str]:
    for path in (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"):
        if path is not None and os.path.exists(path):
            options = ["--error-exitcode", "77", "--report-api-errors", "no"]
            usage = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30).stdout
            # Without room between them, a byte beyond an allocation may be in the next one.
            return [path, *options, *(["--padding", "256"] if "--padding" in usage else [])]
    raise FileNotFoundError("compute-sanitizer, of the CUDA toolkit, is not on PATH")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int | None, str]]]:
    """Exit code (None: ended at the limit) and output of each run."""
    folder = tmp_path_factory.mktemp("sanitizer")
    command = _command()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number, (name, (check, argument, env)) in enumerate(RUNS.items()):
            with open(folder / str(number), "wb") as log:
                processes[name] = subprocess.Popen(
                    [*command, "--tool", check, sys.executable, _PROGRAM, argument],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        **env,
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    },
                )
        limit = time.monotonic() + LIMIT
        results: dict[str, tuple[int | None, str]] = {}
        for number, (name, process) in enumerate(processes.items()):
            try:
                code: int | None = process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            results[name] = (code, (folder / str(number)).read_text(errors="replace"))
        yield results
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _summary(text: str) -> str:
    """What the tool said, and the end of what the program did."""
    said = [line for line in text.splitlines() if line.startswith("=========")]
    return "\n".join([*said[:40], "...", text[-1500:]])


@pytest.mark.limit(LIMIT + 60)
@pytest.mark.parametrize("name", [name for name in RUNS if "seeded" not in name])
def test_no_tool_complains(outputs: dict[str, tuple[int | None, str]], name: str) -> None:
    code, text = outputs[name]
    assert code == 0, f"exit code {code}:\n{_summary(text)}"
    assert "ERROR SUMMARY: 0 errors" in text or "RACECHECK SUMMARY: 0 hazards" in text, _summary(text)
    wanted = RUNS[name][1]
    if f"done with {wanted} ranks" not in text:
        assert "done with 1 ranks" in text, _summary(text)
        warnings.warn(
            f"{name}: kernels of {wanted} ranks cannot wait for one another here; it ran with one",
            stacklevel=1,
        )


@pytest.mark.limit(LIMIT + 60)
def test_a_seeded_bug_is_reported(outputs: dict[str, tuple[int | None, str]]) -> None:
    code, text = outputs["memcheck, seeded bug"]
    assert code == 77, f"exit code {code}:\n{_summary(text)}"
    assert "Invalid __global__ write" in text and "copy_kernel" in text, _summary(text)

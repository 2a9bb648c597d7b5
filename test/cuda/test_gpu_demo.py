"""The demo with its ranks on the GPU: a transformer split over ranks and compiled trains as the unsplit one does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_ranks import DEVICE, PATIENCE

LICENSE = Path(__file__).parents[2] / "LICENSE"
RANKS, STEPS = 3, 12


@pytest.mark.limit(140)
def test_the_demo_on_the_gpu() -> None:
    command = [sys.executable, "-m", "torch_gpusync", "demo", "--device", DEVICE, "--text", str(LICENSE)]
    with subprocess.Popen(
        [*command, "--ranks", str(RANKS), "--steps", str(STEPS), "--timeout", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            said, _ = demo.communicate(timeout=min(110, PATIENCE))
        except subprocess.TimeoutExpired:
            os.killpg(demo.pid, signal.SIGKILL)
            pytest.fail(f"the demo did not end:\n{demo.communicate()[0]}")
    assert demo.returncode == 0, said
    assert re.search(rf"^demo passed: max abs error \S+ over {RANKS} ranks$", said, re.MULTILINE), said

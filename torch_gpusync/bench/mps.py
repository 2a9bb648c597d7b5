"""NVIDIA's MPS daemon: with it the kernels of several processes on one GPU run side by side, not in turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"


def _find() -> str | None:
    """The control program: on PATH, or in the driver's own folder beside nvidia-smi."""
    found = shutil.which(_CONTROL)
    smi = shutil.which("nvidia-smi")
    if found is None and smi is not None:
        beside = Path(smi).resolve().parent / _CONTROL
        found = str(beside) if beside.exists() else None
    return found


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Start the daemon, with folders of its own, for processes started inside; end it in any case.

    Yields a line that says what is the case: without the daemon, ranks that share a GPU are right but take
    turns of milliseconds. A daemon that runs already (``CUDA_MPS_PIPE_DIRECTORY`` is set) is left alone.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "MPS: the daemon that runs already"
        return
    control = _find()
    if control is None:
        yield f"MPS: {_CONTROL} was not found; ranks on one GPU take turns, and figures mean little"
        return
    with tempfile.TemporaryDirectory(prefix="gpusync-mps-") as folder:
        places = {
            f"CUDA_MPS_{kind}_DIRECTORY": os.path.join(folder, kind.lower()) for kind in ("PIPE", "LOG")
        }
        for place in places.values():
            os.mkdir(place)
        os.environ.update(places)
        # The daemon sees all GPUs: what its clients may see, they choose among those that it sees.
        daemon = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        try:
            subprocess.run([control, "-d"], env=daemon, check=True, timeout=30)
            yield "MPS: the daemon was started"
        finally:
            subprocess.run([control], input=b"quit\n", check=False, timeout=60, stdout=subprocess.DEVNULL)
            for name in places:
                os.environ.pop(name, None)

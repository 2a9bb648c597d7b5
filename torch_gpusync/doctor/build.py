"""Probes of what is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, human, one_line

_OLDEST_TORCH = (2, 11)


def versions() -> Iterator[Finding]:
    """Python, torch and this package."""
    section = "versions"
    yield Finding(section, "python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding(section, "system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    if platform.system() != "Linux":
        yield Finding(
            section, "linux", "bad", "shared memory and futexes are used as Linux has them", "use Linux"
        )
    try:
        yield Finding(section, "torch_gpusync", "ok", importlib.metadata.version("torch_gpusync"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            *(
                section,
                "torch_gpusync",
                "note",
                f"not installed, imported from {Path(__file__).parent.parent}",
            ),
            "pip install --no-build-isolation .",
        )
    try:
        import torch
    except Exception as error:
        yield Finding(section, "torch", "bad", f"does not import: {one_line(error)}", "install torch>=2.11")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    oldest = ".".join(map(str, _OLDEST_TORCH))
    if version < _OLDEST_TORCH:
        yield Finding(section, "torch", "bad", torch.__version__, f"install torch {oldest} or later")
    else:
        yield Finding(section, "torch", "ok", torch.__version__)
    cuda = torch.version.cuda
    yield Finding(section, "torch's CUDA", "ok", cuda if cuda else "none: this torch is for CPUs only")


def library() -> Iterator[Finding]:
    """Does the compiled library load, and which kernels does it hold?"""
    section = "library"
    spec = importlib.util.find_spec("torch_gpusync._C")
    if spec is None or spec.origin is None:
        yield Finding(
            *(section, "file", "bad", "not found"),
            "pip install --no-build-isolation . (and leave the source folder: it hides what is installed)",
        )
        return
    yield Finding(section, "file", "ok", f"{spec.origin} ({human(os.path.getsize(spec.origin))})")
    try:
        from torch_gpusync.ops import ops
    except Exception as error:
        advice = (
            "build it again for this torch: pip install --no-build-isolation --force-reinstall --no-deps ."
        )
        yield Finding(section, "loads", "bad", one_line(error), advice)
        return
    import torch

    names = sorted(
        name.removeprefix("gpusync::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("gpusync::") and not name.startswith("gpusync::_")
    )
    yield Finding(section, "ops", "ok" if ops is not None and names else "bad", ", ".join(names))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    runs = torch._C._dispatch_has_computed_kernel_for_dispatch_key  # also where other ops make the op up
    for key in ("CPU", "CUDA"):
        if any(has_kernel(f"gpusync::{name}", key) for name in names):
            usable = sum(runs(f"gpusync::{name}", key) for name in names)
            built_for = f"; compiled for sm_{ops._cuda_architectures()}" if key == "CUDA" else ""
            yield Finding(section, f"{key} kernels", "ok", f"for {usable} of {len(names)} ops{built_for}")
        elif key == "CPU":
            yield Finding(section, f"{key} kernels", "bad", "none", "build the library again")
        elif torch.version.cuda:
            yield Finding(
                section, f"{key} kernels", "note", "none", "for GPUs, build it where nvcc is on PATH"
            )
        else:
            yield Finding(section, f"{key} kernels", "ok", "none")

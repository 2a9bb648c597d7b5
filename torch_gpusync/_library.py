"""Finds the compiled library and loads it once."""

import functools
import importlib.util
from pathlib import Path

import torch


def path() -> Path:
    """Where the library lies: beside the headers, which in an editable install are apart from the Python files.

    Raises:
        ImportError: the library was not built; the message lists the likely causes.
    """
    spec = importlib.util.find_spec("torch_gpusync._C")
    if spec is None or spec.origin is None:
        raise ImportError(
            "torch_gpusync was found without its compiled library (_C). Likely causes: the working directory is the "
            "source tree, whose torch_gpusync/ hides the installed package (set PYTHONSAFEPATH=1 or change "
            "directory), or the package was copied instead of installed (pip install --no-build-isolation .)."
        )
    return Path(spec.origin)


@functools.cache
def load() -> None:
    """Register the library's ops with the dispatcher.

    Raises:
        ImportError: the library was not built, or does not fit this torch; the message lists the likely
        causes.
    """
    library = path()
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ImportError(
            f"{library} does not load into torch {torch.__version__}: {error}. Likely causes: torch is older than "
            "2.11, or the library was built for another platform. Build it again: "
            "pip install --no-build-isolation --force-reinstall --no-deps torch_gpusync."
        ) from error

"""Keeps torch's compile caches from serving code that another version of this library was traced into.

Their keys know an op by its schema. What else becomes part of a compiled graph, gradients above all, comes from the
Python files beside this one, and a cache outlives an upgrade.
"""

import hashlib
from pathlib import Path


def tag() -> str:
    """Differs between any two versions of the Python files that ops, gradients and modules are made of."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted((*folder.glob("*.py"), *folder.glob("nn/*.py"))):
        digest.update(file.read_bytes())
    return f"gpusync-{digest.hexdigest()[:16]}"


def separate() -> None:
    """Add the tag to torch's own for its caches, which a user may have set."""
    from torch.compiler import config

    config.cache_key_tag = "+".join(filter(None, (config.cache_key_tag, tag())))

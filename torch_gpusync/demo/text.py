"""The training data: bytes of a real text, drawn in the same order by every process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import torch

from .config import Config, DemoError


def find_license() -> Path:
    """The project's LICENSE: in the source tree if the package is in one, else in the installed metadata."""
    tree = Path(__file__).resolve().parents[2]
    if (tree / "pyproject.toml").is_file() and (tree / "LICENSE").is_file():
        return tree / "LICENSE"
    try:
        files = importlib.metadata.files("torch_gpusync") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for entry in files:
        if entry.name == "LICENSE" and ".dist-info" in entry.parts[0]:
            return Path(str(entry.locate()))
    raise DemoError("found no LICENSE beside the sources nor in the installed metadata: pass --text FILE")


def read_text(path: Path, config: Config) -> torch.Tensor:
    """The file's bytes as an int64 tensor of shape [length], each in [0, 256)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read the text {path}: {error.strerror}") from error
    if len(content) <= config.context:
        raise DemoError(f"the text {path} has {len(content)} bytes; more than {config.context} are needed")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def batches(text: torch.Tensor, config: Config) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each step some bytes and those that follow them, both int64 [batch, context]; fixed by the seed."""
    generator = torch.Generator().manual_seed(config.seed)
    window = torch.arange(config.context + 1)
    for _ in range(config.steps):
        starts = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator)
        sequences = text[starts + window]
        yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

"""What the run shows: its progress, how far the two models are apart, and one table of times."""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

import torch

from .config import Config
from .split import gather, replica_error
from .train import Result

_LINES = 8  # of progress, where there is no bar


class Progress:
    """A tqdm bar where there are tqdm and a terminal, else a line now and then. A context manager."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.done = title, steps, 0
        self.bar: Any = None
        try:
            from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            tqdm = None
        if tqdm is not None and _room_for_a_bar():
            self.bar = tqdm(total=steps, desc=title, unit="step")
        else:
            print(f"{title}: 0/{steps} steps", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, step: int, loss: float) -> None:
        """``step`` steps are finished, the last one with ``loss``."""
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self.bar.update(step - self.done)
        elif self.done == 0 or step == self.steps or self._part(step) > self._part(self.done):
            print(f"{self.title}: {step}/{self.steps} steps, loss {loss:.4f}", flush=True)
        self.done = step

    def _part(self, step: int) -> int:
        return step * _LINES // self.steps


def _room_for_a_bar() -> bool:
    """Is standard error a terminal with a size? tqdm shows nothing on one that says it is 0 columns wide."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # not a terminal; not a file at all
        return False


def errors(whole: Result, ranks: list[Result]) -> dict[str, float]:
    """Greatest absolute differences of the split run from the unsplit one, by what was compared."""
    full = gather([result["weights"] for result in ranks])
    losses = torch.tensor([result["losses"] for result in ranks], dtype=torch.float64)
    expected = torch.tensor(whole["losses"], dtype=torch.float64).expand_as(losses)
    logits = torch.cat([result["logits"] for result in ranks], -1)
    weights = torch.stack([_distance(full[name], tensor) for name, tensor in whole["weights"].items()])
    return {
        "losses": float(_distance(losses, expected)),
        "logits": float(_distance(logits, whole["logits"])),
        "weights": float(weights.max()),
        "replicas": replica_error([result["weights"] for result in ranks]),
    }


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape != b.shape:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
    return (a - b).abs().max()


def table(config: Config, whole: Result, ranks: list[Result]) -> str:
    """Times of the slowest rank; medians over the steps after the first one, which holds the compilation."""
    rest = slice(1, None) if config.steps > 1 else slice(None)
    step = max(statistics.median(result["seconds"][rest]) for result in ranks)
    unsplit_step = statistics.median(whole["seconds"][rest])
    calls = sorted({count for result in ranks for count in result["calls"]})
    slowest = {name: _time(max(result["latency"][name] for result in ranks)) for name in ranks[0]["latency"]}
    shape = f"fp32[{config.batch}, {config.context}, {config.width}]"
    rows = [
        ("", f"gpusync, {config.ranks} rank{'s' * (config.ranks > 1)}", "beside it"),
        ("loss of the first and last step", _losses(ranks[0]), f"{_losses(whole)}  unsplit"),
        ("first step, with compilation", _time(max(result["seconds"][0] for result in ranks)), ""),
        ("time per step", _time(step), f"{_time(unsplit_step)}  unsplit, one process, eager"),
        ("sync calls per step", " or ".join(map(str, calls)), ""),
        ("barrier latency", slowest["barrier gpusync"], f"{slowest['barrier gloo']}  Gloo"),
        (
            f"all-reduce latency, {shape}",
            slowest["all_reduce gpusync"],
            f"{slowest['all_reduce gloo']}  Gloo",
        ),
    ]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{a:<{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _losses(result: Result) -> str:
    return f"{result['losses'][0]:.4f}, {result['losses'][-1]:.4f}"


def _time(seconds: float) -> str:
    for unit, scale in (("s ", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:6.2f} {unit}"
    return f"{seconds * 1e6:6.2f} µs"

"""The command line of the demo, and the run as a whole."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import torch

from torch_gpusync.cuda_memory import has_kernels

from .config import TOLERANCE, Config, DemoError
from .launch import RankFailure, Worker, run_ranks
from .report import Progress, errors, table
from .text import find_license, read_text
from .train import initial_weights, train_rank, train_unsplit


def main(argv: list[str] | None = None) -> int:
    """Parse ``argv`` (default: the process's), run the demo, return its exit code: 0 passed, 1 failed."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_gpusync demo", description=sys.modules[__package__].__doc__
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=Config.ranks,
        metavar="N",
        help="processes to split over (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=Config.steps, metavar="K", help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="what to train on (default: the project's LICENSE)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=Config.device, help="default: %(default)s"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=Config.timeout_s,
        metavar="SECONDS",
        help="give up when no rank makes progress for so long, compilation included (default: %(default)g)",
    )
    options = parser.parse_args(argv)
    try:
        config = Config(
            ranks=options.ranks, steps=options.steps, device=options.device, timeout_s=options.timeout
        )
    except DemoError as error:
        return _failed(error)
    return run(config, options.text)


def run(config: Config, text: Path | None = None, worker: Worker = train_rank) -> int:
    """Train unsplit and split, compare, print; return the exit code. ``worker``: what each rank runs."""
    try:
        _check_device(config)
        path = text or find_license()
        _train_and_compare(config, path, worker)
    except DemoError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return _failed(DemoError("interrupted"))
    return 0


def _failed(error: DemoError) -> int:
    if isinstance(error, RankFailure) and error.details:
        print(error.details, file=sys.stderr, flush=True)
    print(f"demo failed: {error}", flush=True)
    return 1


def _check_device(config: Config) -> None:
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise DemoError("--device cuda needs a CUDA device, and torch finds none here")
        if not has_kernels():
            raise DemoError("--device cuda needs CUDA kernels, and this build of gpusync has none")


def _train_and_compare(config: Config, path: Path, worker: Worker) -> None:
    data = read_text(path, config)
    weights = initial_weights(config)
    parameters = sum(tensor.numel() for tensor in weights.values())
    size = f"{config.layers} layers, {config.heads} heads, {parameters} parameters"
    print(f"text: {path}, {len(data)} bytes; model: {size}", flush=True)
    begin = time.monotonic()
    with Progress("unsplit, one process", config.steps) as progress:
        whole = train_unsplit(weights, data, config, progress)
    with tempfile.TemporaryDirectory(prefix="gpusync-demo-") as folder:
        torch.save({"weights": weights, "text": data}, Path(folder) / "start.pt")
        print(
            "starting the ranks; their first step compiles the model and takes most of the time", flush=True
        )
        with Progress(f"split over {config.ranks} ranks, compiled", config.steps) as progress:
            ranks = run_ranks(worker, config, Path(folder), progress)
    print(f"\n{table(config, whole, ranks)}\n")
    found = errors(whole, ranks)
    listed = ", ".join(f"{what} {error:.2e}" for what, error in found.items())
    print(f"total {time.monotonic() - begin:.1f} s; max abs error: {listed}")
    # NaN counts as the worst, and is not <= anything.
    what, worst = max(found.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    if not worst <= TOLERANCE:
        raise DemoError(
            f"{what} differ from the unsplit model's by {worst:.2e} over {config.ranks} ranks; "
            f"{TOLERANCE:g} would be rounding"
        )
    print(f"demo passed: max abs error {worst:.2e} over {config.ranks} ranks", flush=True)

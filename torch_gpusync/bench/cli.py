"""The command line: what to measure, on how many ranks, and where the figures go."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from . import cuda, mps, tune
from . import plan as plans
from .cpu import run_rank
from .decode import HIDDEN
from .launcher import RankFailure, launch
from .mpich import Mpi, MpiError
from .plan import EXCHANGES, Case, Plan
from .results import Measurement, combine, table, with_best_of, write_json
from .timing import Sampling, Series

_QUICK = Sampling(rounds=3, sample_s=0.03)
_SIZES = "4K,64K,1M,16M"
_GPU_SIZES = "8K,64K,512K,4M"
_DECODE_BATCHES = (1, 8, 32)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Exit code: 0; 1 when a rank failed; 2 for wrong arguments or a missing device."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        plan, ranks = _plan(options)
    except ValueError as error:
        parser.error(str(error))
    if obstacle := _obstacle(options.device):
        print(f"bench --device {options.device}: {obstacle}", file=sys.stderr)
        return 2
    progress = _Progress()
    progress.line(plans.machine())
    if options.tune:
        if options.device != "cuda":
            parser.error("--tune is for GPUs: add --device cuda")
        return _tune(options.tune, ranks, progress)
    measurements: list[Measurement] = []
    failed = False
    try:
        with tempfile.TemporaryDirectory(prefix="gpusync-bench-") as folder:
            if options.device == "cuda":
                _measure_on_gpus(ranks, plan, progress, measurements)
            else:
                mpi = _find_mpi(Path(folder), progress)
                for n in ranks:
                    measurements += _measure(n, plan, mpi, progress)
    except RankFailure as failure:
        progress.line(f"{failure}\n{failure.details}".rstrip())
        failed = True
    except KeyboardInterrupt:
        progress.line("interrupted")
        failed = True
    progress.line(plans.machine())
    if options.device == "cuda":
        measurements = with_best_of(measurements, "symm_mem")
    print(table(measurements))
    if options.json:
        write_json(measurements, options.json)
    if options.plot and not failed:
        from .plot import plot

        plot(measurements, options.plot)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_gpusync bench",
        description="Measure gpusync's ops beside the alternatives found on this machine, in the same run. "
        "Progress goes to stderr, one table to stdout.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", help="numbers of processes (default: 1,2,4,8; on GPUs 2,4,8)")
    parser.add_argument(
        "--ops", default="barrier,all_reduce", help=f"of {', '.join(plans.OPS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes", help=f"bytes of each rank's payload (default: {_SIZES}; on GPUs {_GPU_SIZES})"
    )
    parser.add_argument(
        "--modes",
        default="eager",
        help="eager, compile or both (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, help=f"samples of each (default: {Sampling.rounds})")
    parser.add_argument("--sample", type=float, help=f"seconds of one sample (default: {Sampling.sample_s})")
    parser.add_argument("--quick", action="store_true", help="few and short samples: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a list of objects")
    parser.add_argument(
        "--tune",
        type=Path,
        metavar="FILE",
        help="instead, write a table of the fastest all-reduce choices (GPUs)",
    )
    parser.add_argument(
        "--nccl-symmetric",
        action="store_true",
        help="also NCCL's all-reduce on memory registered for its symmetric kernels (GPUs, one for each rank)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    return parser


def _plan(options: argparse.Namespace) -> tuple[Plan, list[int]]:
    ops = options.ops.split(",")
    modes = tuple(options.modes.split(","))
    for given, known, what in ((ops, plans.OPS, "op"), (modes, plans.MODES, "mode")):
        for value in given:
            if value not in known:
                raise ValueError(f"unknown {what} '{value}': choose from {', '.join(known)}")
    on_gpus = options.device == "cuda"
    ranks = [int(text) for text in (options.ranks or ("2,4,8" if on_gpus else "1,2,4,8")).split(",")]
    if not all(1 <= n <= 64 for n in ranks):
        raise ValueError("ranks are 1 to 64")
    sizes = [
        plans.parse_bytes(text) for text in (options.sizes or (_GPU_SIZES if on_gpus else _SIZES)).split(",")
    ]
    if not all(size > 0 and size % 4 == 0 for size in sizes):
        raise ValueError("sizes are positive multiples of 4 bytes (fp32)")
    default = _QUICK if options.quick else Sampling()
    sampling = Sampling(options.rounds or default.rounds, options.sample or default.sample_s)
    if sampling.rounds < 1 or sampling.sample_s <= 0:
        raise ValueError("rounds and the seconds of a sample must be positive")
    cases: list[Case] = []
    for op in ops:
        if op == "decode":
            if not on_gpus:
                raise ValueError("decode is measured on GPUs only: add --device cuda")
            cases += [Case(op, 2 * HIDDEN * batch) for batch in _DECODE_BATCHES]
        else:
            cases += [Case(op)] if op == "barrier" else [Case(op, size) for size in sizes]
    if options.nccl_symmetric and not on_gpus:
        raise ValueError("--nccl-symmetric is for GPUs: add --device cuda")
    return Plan(tuple(cases), sampling, modes, options.nccl_symmetric), ranks


def _obstacle(device: str) -> str:
    """Why nothing can be measured on ``device``; empty when it can."""
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"no GPU: torch {torch.__version__}, {built}, sees none on this machine"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("gpusync::barrier", "CUDA"):
        return "this build of torch_gpusync holds no CUDA kernels: build it where nvcc is on PATH"
    return ""


def _find_mpi(folder: Path, progress: _Progress) -> Mpi | None:
    try:
        return Mpi(folder)
    except MpiError as error:
        progress.line(f"MPI is not among the peers: {error}")
        return None


def _measure(n: int, plan: Plan, mpi: Mpi | None, progress: _Progress) -> list[Measurement]:
    """Everything at ``n`` ranks."""
    progress.line(f"{n} {'ranks' if n > 1 else 'rank'}: {', '.join(map(str, plan.cases))}")
    if mpi is not None and n > plans.cores():
        progress.line(f"{mpi.name} is left out at {n} ranks on {plans.cores()} cores: its ranks spin")
        mpi = None
    if n == 1:
        mpi = None  # nobody to talk to: its calls return at once
    before = _run_mpi(mpi, n, plan, progress)
    by_rank = launch(run_rank, n, plan, on_progress=lambda text: progress.show(f"{n} ranks, {text}"))
    after = _run_mpi(mpi, n, plan, progress)
    measurements: list[Measurement] = []
    for index, case in enumerate(plan.cases):
        if case in before and case in after:
            calls = min(before[case].ops_per_sample, after[case].ops_per_sample)
            merged = Series(
                *(case.op, before[case].impl, "eager", True, calls),
                before[case].samples_us + after[case].samples_us,
            )
            measurements.append(combine([merged], "cpu", case.nbytes, ranks=n))
        for subject in range(len(by_rank[0][index][1])):
            measurements.append(
                combine([cases[index][1][subject] for cases in by_rank], "cpu", case.nbytes, ranks=n)
            )
    for m in measurements:
        size = f" {plans.human(m.bytes)}" if m.bytes else ""
        progress.line(f"  {m.op}{size}, {m.impl}, {m.mode}: {m.median_us:.2f} µs")
    return measurements


def _measure_on_gpus(
    ranks: list[int], plan: Plan, progress: _Progress, measurements: list[Measurement]
) -> None:
    """One process for each rank, on a GPU of its own where there are enough, else under MPS on the same. Adds to
    ``measurements`` with every number of ranks, so that a failure at one leaves those before it."""
    progress.line(f"{plans.gpus()}, CUDA {torch.version.cuda}")
    shared = any(n > torch.cuda.device_count() for n in ranks)
    with mps.running() if shared else contextlib.nullcontext("MPS: not needed") as situation:
        progress.line(situation)
        for n in ranks:
            by_rank = launch(cuda.run_rank, n, plan, on_progress=partial(_show_ranks, progress, n))
            for index, case in enumerate(plan.cases):
                for subject in range(len(by_rank[0][index][1])):
                    measurements.append(
                        combine([cases[index][1][subject] for cases in by_rank], "cuda", case.nbytes, ranks=n)
                    )
            for m in measurements:
                if m.ranks == n:
                    size = f" {plans.human(m.bytes)}" if m.bytes else ""
                    progress.line(f"  {n} ranks: {m.op}{size}, {m.impl}, {m.mode}: {m.median_us:.2f} µs")


def _tune(path: Path, ranks: list[int], progress: _Progress) -> int:
    """One table, for ranks with a GPU each or for ranks that share one."""
    count = torch.cuda.device_count()
    own_gpu = max(ranks) <= count
    if not own_gpu and count > 1:
        progress.line(f"--tune: for ranks that share a GPU, let this process see one (it sees {count})")
        return 2
    rows = {}
    with contextlib.nullcontext("") if own_gpu else mps.running() as situation:
        progress.line(f"{plans.gpus()} {situation}".rstrip())
        for n in ranks:
            try:
                rows[n] = launch(tune.run_rank, n, own_gpu, on_progress=progress.line)[0]
            except RankFailure as failure:
                progress.line(f"{failure}\n{failure.details}".rstrip())
                return 1
    name = torch.cuda.get_device_name(0)
    tune.write(path, name, 1 if own_gpu else max(ranks), f"{plans.gpus()}, torch {torch.__version__}", rows)
    return 0


def _show_ranks(progress: _Progress, n: int, text: str) -> None:
    say = progress.line if " left out" in text else progress.show
    say(f"{n} ranks, {text}")


def _run_mpi(mpi: Mpi | None, n: int, plan: Plan, progress: _Progress) -> dict[Case, Series]:
    """Half of its rounds."""
    cases = [case for case in plan.cases if case.op not in EXCHANGES]
    if mpi is None or not cases:
        return {}
    progress.show(f"{n} ranks, {mpi.name}")
    try:
        return mpi.run(n, cases, Sampling((plan.sampling.rounds + 1) // 2, plan.sampling.sample_s))
    except MpiError as error:
        progress.line(str(error))
        return {}


class _Progress:
    """On a terminal one line that changes, and lines that stay; elsewhere lines only, of the rounds the first."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stage = ""

    def show(self, text: str) -> None:
        stage = text.partition(": round ")[0]
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:  # where a log ends, there it hung
            print(text, file=sys.stderr, flush=True)
        self._stage = stage

    def line(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._terminal else text, file=sys.stderr, flush=True)

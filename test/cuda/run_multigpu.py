"""The run on several GPUs of one host: `make test-multigpu PYTHON=... WHEEL=... [RANKS=...] [OUT=...]`.

With a GPU for each rank: the tests whose ranks are processes, a tuning table, and the figures of its choices beside
SymmetricMemory and NCCL. On a machine with fewer GPUs than ranks the same command runs with ranks that share them, under
MPS: how it is tried out. Tables, plots and logs go to OUT. Every step is a process under a time limit, all of them
together take less than 8 minutes unless --limit says otherwise, and --skip leaves steps out; the exit code is 0 only when
all that were run succeeded. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import run_gpu_tests

HERE = Path(__file__).resolve().parent
GRACE = 10.0  # seconds for a step that has been told to end
TABLE = "tuning.json"  # of choices, made by the step `tune` and used by those behind it
LIMIT = "{limit}"  # in a command: the seconds that it has, less those in which it reports


@dataclass(frozen=True)
class Step:
    limit: float  # seconds; what a step leaves over of them, later ones may use
    command: list[str]


def steps(options: argparse.Namespace, gpus: int, out: Path) -> dict[str, Step]:
    """What is run, in this order: 450 seconds in all for one number of ranks. The last one may fail without harm to the
    others."""
    times = len(options.ranks.split(","))
    bench = [options.python, "-m", "torch_gpusync", "bench", "--device", "cuda", "--ranks", options.ranks]

    def tests(limit: float, part: str, *more: str) -> Step:
        runner = [options.python, str(HERE / "run_gpu_tests.py"), "--python", options.python]
        wheel = ["--wheel", str(options.wheel.resolve()), "--limit", LIMIT]
        return Step(limit, [*runner, *wheel, "--part", part, "--log", str(out / f"tests_{part}.log"), *more])

    def figures(limit: float, name: str, *more: str) -> Step:
        return Step(
            limit * times,
            [*bench, *more, "--rounds", "7", "--sample", "0.02", "--json", str(out / f"{name}.json")],
        )

    exchanges = ["--ops", "all_gather,reduce_scatter", "--sizes", options.exchange_sizes]
    return {
        "tests": tests(75, "gpus" if gpus > 1 else "mps"),
        "barrier": figures(35, "barrier", "--ops", "barrier"),
        "tune": Step(40 * times, [*bench, "--tune", str(out / TABLE)]),
        "all_reduce": figures(70, "all_reduce", "--ops", "all_reduce", "--sizes", options.sizes),
        "exchanges": figures(40, "exchanges", *exchanges),
        "decode": figures(85, "decode", "--ops", "decode"),
        "compile": tests(80, "compile", "--select", "reduce-overhead"),
        "nccl_symmetric": figures(
            *(25, "nccl_symmetric", "--ops", "all_reduce", "--sizes", "8K,512K", "--nccl-symmetric")
        ),
    }


def run(command: list[str], env: dict[str, str], output: Path, limit: float) -> int | None:
    """The exit code, or None when the step had to be ended, with all that it has started."""
    with open(output, "w") as file:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(
                signal.SIGINT
            )  # what numbers of ranks have been measured is still written, and MPS ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            run_gpu_tests.end_leftovers(spared="")
    return code


def show(path: Path, lines: int) -> None:
    """The end of a step's output."""
    text = path.read_text(errors="replace").splitlines()
    print("\n".join(line[:200] for line in text[-lines:]), flush=True)


def report(python: str, env: dict[str, str], files: list[Path], out: Path) -> None:
    """All figures as one table and, where there is matplotlib, one picture."""
    code = (
        "import importlib.util, sys; from pathlib import Path; from torch_gpusync.bench.plot import plot\n"
        "from torch_gpusync.bench.results import read_json, table\n"
        "figures = [m for name in sys.argv[2:] for m in read_json(Path(name))]; print(table(figures), flush=True)\n"
        "if figures and importlib.util.find_spec('matplotlib'): plot(figures, Path(sys.argv[1]))"
    )
    found = [str(path) for path in files if path.exists()]
    if (
        found
        and run([python, "-c", code, str(out / "figures.png"), *found], env, out / "figures.txt", 60) == 0
    ):
        show(out / "figures.txt", 1000)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="the Python whose torch is used")
    parser.add_argument("--wheel", required=True, type=Path, help="the torch_gpusync wheel under test")
    parser.add_argument(
        "--ranks", default="2", help="numbers of ranks to measure, such as 2,4,8 (default: 2)"
    )
    parser.add_argument("--out", default=Path("build/multigpu"), type=Path, help="folder for what is written")
    parser.add_argument("--sizes", default="1K,8K,64K,512K,4M,16M", help="bytes of all-reduce payloads")
    parser.add_argument("--exchange-sizes", default="8K,512K,4M", help="of the other collectives'")
    parser.add_argument(
        "--limit", default=455.0, type=float, help="seconds for all steps (default: %(default)s)"
    )
    parser.add_argument("--skip", default="", help="steps to leave out, such as tests,compile,tune")
    options = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # for the steps, also when this runs in the background
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    run_gpu_tests.adopt_orphans()
    count = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run(
        [options.python, "-c", count], capture_output=True, text=True, timeout=120, check=True
    )
    gpus = int(found.stdout)
    chosen = steps(options, gpus, out)
    skipped = [name for name in options.skip.split(",") if name]
    if unknown := [name for name in skipped if name not in chosen]:
        parser.error(f"there is no step {', '.join(unknown)}: they are {', '.join(chosen)}")
    results = {}
    allowed = 0.0
    with tempfile.TemporaryDirectory(prefix="gpusync-multigpu-") as folder:
        run_gpu_tests.unpack(options.wheel, Path(folder), options.python)
        env = {
            **os.environ,
            **run_gpu_tests.MULTICAST_OFF,
            "PYTHONPATH": folder,
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
        }
        for name, step in chosen.items():
            allowed += step.limit
            (out / f"{name}.json").unlink(missing_ok=True)  # of an earlier run
            if name in skipped:
                continue
            begun = time.monotonic()
            limit = started + min(allowed, options.limit) - begun
            print(f"######## {name}, for up to {limit:.0f} s", flush=True)
            if limit < 5:
                results[name] = ("NOT RUN: no time", 0.0)
                continue
            command = [word.replace(LIMIT, f"{max(limit - GRACE, 5):.0f}") for word in step.command]
            code = run(command, env, out / f"{name}.txt", limit)
            seconds = time.monotonic() - begun
            show(out / f"{name}.txt", 25 if code == 0 else 80)
            ended = f"ENDED after {seconds:.0f} s" if code is None else f"FAILED ({code})"
            results[name] = ("passed" if code == 0 else ended, seconds)
            if name == "tune" and code == 0:
                env["GPUSYNC_TUNING"] = str(out / TABLE)
        print("######## figures", flush=True)
        # Not the last step's: ratios are between figures of one run, and that one has peers of its own.
        files = [out / f"{name}.json" for name in chosen if name != "nccl_symmetric"]
        report(options.python, env, files, out)
    print(
        "\n".join(f"{name:15} {verdict:18} {seconds:5.0f} s" for name, (verdict, seconds) in results.items())
    )
    print(f"{gpus} GPUs, {time.monotonic() - started:.0f} s in all")
    return int(any(verdict != "passed" for verdict, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())

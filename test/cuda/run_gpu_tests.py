"""Runs the GPU tests from a wheel: `make test-gpu PYTHON=... WHEEL=...`. Needs one NVIDIA GPU, a Python with torch 2.11 or
later and pytest, and no network: the wheel is unpacked into a folder of its own (with pytest's wheels, should they lie
beside it and pytest be missing). The part `kernels` needs nvcc and g++ as well, for it compiles a user's kernel.

The tests run in parts, each a process of its own under a watchdog that ends all that it has started. Parts with ranks
side by side on the GPU get NVIDIA's MPS daemon, which is ended afterwards in any case. The log goes to --log, what has
failed and a table to the terminal. The exit code is 0 only when every test of every part has run and passed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

HERE = Path(__file__).resolve().parent
TOTAL_LIMIT = 22 * 60.0  # seconds, all parts together
# Programs that use NVLink multicast can put shared GPUs out of service.
MULTICAST_OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
PYTEST_WHEELS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "Pygments")


@dataclass(frozen=True)
class Part:
    files: tuple[str, ...]
    limit: float  # seconds
    processes: bool = False  # each rank is one; else they are streams of one
    mps: bool = False
    own_gpus: bool = False  # needs two or more, one for each rank; run only when it is asked for


PARTS = {
    "ops": Part(("test_gpu_ops.py", "test_gpu_rms_norm.py"), 240),
    "graphs": Part(("test_gpu_streams.py", "test_gpu_graphs.py"), 240),
    "faults": Part(("test_gpu_faults.py", "test_gpu_reset.py"), 240),
    "setup": Part(("test_gpu_setup.py", "test_gpu_lifetime.py"), 240),
    "kernels": Part(("test_gpu_kernels.py",), 240),
    "mps": Part(("test_gpu_processes.py",), 240, processes=True, mps=True),
    "processes": Part(("test_gpu_processes.py",), 240, processes=True),
    "gpus": Part(("test_gpu_processes.py",), 240, processes=True, own_gpus=True),
    "compile": Part(("test_gpu_compile.py", "test_gpu_demo.py"), 470, processes=True, mps=True),
    "sanitizer": Part(("test_gpu_sanitizer.py",), 240),
}


@dataclass
class Result:
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    note: str = ""


def stop(message: str) -> NoReturn:
    print(f"test-gpu: {message}", file=sys.stderr)
    sys.exit(2)


# ---- processes


def adopt_orphans() -> None:
    """What a part leaves behind becomes this process's child, where it can be found."""
    subreaper = 36  # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(subreaper, 1, 0, 0, 0)


def children() -> dict[int, str]:
    """This process's children: process id and name."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(") ")
            if int(rest.split()[1]) == os.getpid():
                found[int(entry.name)] = name
    return found


def end_leftovers(spared: str = "nvidia-cuda-mps") -> list[str]:
    """Kills every child, and what they leave in turn; returns the names of those that were running."""
    names: list[str] = []
    grace = time.monotonic() + 3.0  # for what is about to end by itself
    while True:
        left = {pid: name for pid, name in children().items() if not spared or not name.startswith(spared)}
        if not left:
            return names
        for pid, name in left.items():
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() > grace:
                    names.append(name)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        time.sleep(0.02)


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """The MPS daemon with folders of its own, for as long as the block lasts; yields the environment for its clients."""
    name = "nvidia-cuda-mps-control"
    smi = shutil.which("nvidia-smi")
    candidates = [
        shutil.which(name),
        smi and Path(smi).resolve().parent / name,
        Path("/usr/local/nvidia/bin") / name,
    ]
    control = next((str(path) for path in candidates if path and Path(path).exists()), None)
    if control is None:
        stop(f"{name} was not found, and the parts with ranks side by side need it: it comes with the driver")
    env = {}
    for kind in ("PIPE", "LOG"):
        place = folder / f"mps-{kind.lower()}"
        place.mkdir(exist_ok=True)
        env[f"CUDA_MPS_{kind}_DIRECTORY"] = str(place)
    # The daemon sees all GPUs: what its clients may see, they choose among those that it sees.
    daemon = {**os.environ, **env}
    daemon.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        subprocess.run([control, "-d"], env=daemon, check=True, timeout=30, stdin=subprocess.DEVNULL)
        yield env
    finally:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            subprocess.run([control], input=b"quit -t 5\n", env=daemon, timeout=30, stdout=subprocess.DEVNULL)
        end_leftovers(spared="")


# ---- a part


def run_part(
    name: str, part: Part, python: str, env: dict[str, str], log: IO[str], limit: float, select: str = ""
) -> Result:
    result, started = Result(), time.monotonic()
    command = [
        python,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "--color=no",
        "-p",
        "no:cacheprovider",
        "-k",
        select,
    ]
    log.write(f"\n######## {name}\n")
    log.flush()
    begin = log.tell()
    process = subprocess.Popen(
        [*command, *(str(HERE / file) for file in part.files)],
        cwd=HERE.parent.parent,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        leftovers = end_leftovers()
    result.seconds = time.monotonic() - started
    text = Path(log.name).read_text(errors="replace")[begin:]
    outcomes = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*$", text, re.MULTILINE)
    result.passed = sum(outcome == "PASSED" for _, outcome in outcomes)
    result.failed = len(outcomes) - result.passed
    if code is None:
        result.note = f"ended after {limit:.0f} s"
    elif code not in (0, 1) or (code == 1 and not result.failed):
        result.note = f"pytest exited with {code}"
    elif not outcomes:
        result.note = "no tests ran"
    if leftovers:
        result.note += f" left running: {', '.join(sorted(set(leftovers)))}"
    for line in re.findall(r"^(?:FAILED|ERROR) \S+::.*$|^.*UserWarning: .*$", text, re.MULTILINE):
        print(f"  {line[:400]}", flush=True)
    if result.note:
        print("\n".join(f"  | {line}" for line in text.splitlines()[-25:]), flush=True)
    return result


def describe_gpu(python: str, env: dict[str, str]) -> str:
    """The GPU, driver and versions; ends the program where there is no GPU."""
    code = (
        "import sys, torch\n"
        "if not torch.cuda.is_available(): sys.exit('no GPU')\n"
        "p = torch.cuda.get_device_properties(0)\n"
        "print(p.name, f'sm_{p.major}{p.minor}', 'torch', torch.__version__, 'Python', sys.version.split()[0])"
    )
    found = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    if found.returncode != 0:
        last = (found.stderr.strip().splitlines() or ["?"])[-1]
        stop(f"these tests need an NVIDIA GPU that torch sees, in {python}: {last}")
    driver = ""
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
        driver = f", driver {answer[0].strip()}" if answer else ""
    return found.stdout.strip() + driver


def count_gpus(python: str, env: dict[str, str]) -> int:
    """As torch sees them."""
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run(
        [python, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return int(found.stdout)


def preload(python: str, env: dict[str, str]) -> dict[str, str]:
    """The environment that lets ranks be forked from a process that has imported the compiler, which saves seconds for
    each; nothing where that does not work, for such a process must not have touched CUDA."""
    code = (
        "import contextlib, importlib, os, sys\n"
        "from torch_gpusync.testing import COMPILER, PRELOAD\n"
        "for name in PRELOAD + COMPILER:\n"
        "    with contextlib.suppress(ImportError): importlib.import_module(name)\n"
        "import torch\n"
        "pid, code = os.fork(), 1\n"
        "if pid == 0:\n"
        "    try: code = int(torch.ones(1, device='cuda').item() != 1)\n"
        "    finally: os._exit(code)\n"
        "sys.exit(os.waitpid(pid, 0)[1] != 0)"
    )
    more = {
        "GPUSYNC_TEST_PRELOAD": "compiler",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() without a context
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    with contextlib.suppress(subprocess.TimeoutExpired):
        tried = subprocess.run([python, "-c", code], env={**env, **more}, capture_output=True, timeout=60)
        return more if tried.returncode == 0 else {}
    return {}


def unpack(wheel: Path, site: Path, python: str) -> None:
    """What PYTHON shall import: the wheel, and pytest should it be missing."""
    if not wheel.is_file():
        stop(f"WHEEL={wheel} is no file: `make build` makes one, in dist/")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    if subprocess.run([python, "-c", "import pytest"], capture_output=True).returncode == 0:
        return
    for name in PYTEST_WHEELS:
        for path in wheel.parent.glob(f"{name}-*.whl"):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site)}
    if subprocess.run([python, "-c", "import pytest"], capture_output=True, env=env).returncode != 0:
        stop(f"{python} has no pytest: install it, or put its wheels beside {wheel}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="the Python whose torch is used")
    parser.add_argument("--wheel", required=True, type=Path, help="the torch_gpusync wheel under test")
    parser.add_argument("--part", default="", help=f"some of {','.join(PARTS)}; default: all but gpus")
    parser.add_argument("--select", default="", help="only tests with this in their names (pytest's -k)")
    parser.add_argument(
        "--log", default="build/test-gpu.log", help="file for everything that the tests print"
    )
    parser.add_argument("--limit", type=float, default=TOTAL_LIMIT, help="seconds for all parts together")
    options = parser.parse_args()
    chosen = [name for name in options.part.split(",") if name] or [
        name for name, part in PARTS.items() if not part.own_gpus
    ]
    if unknown := [name for name in chosen if name not in PARTS]:
        stop(f"there is no part {', '.join(unknown)}: they are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is below is ended
    adopt_orphans()
    Path(options.log).resolve().parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="gpusync-gpu-") as folder, open(options.log, "w+") as log:
        site = Path(folder) / "site"
        unpack(options.wheel, site, options.python)
        env = {
            **os.environ,
            **MULTICAST_OFF,
            "PYTHONPATH": str(site),
            "PYTHONSAFEPATH": "1",  # the source folder would hide the wheel
            "PYTHONUNBUFFERED": "1",
            "GPUSYNC_TEST_DEVICE": "cuda",
        }
        gpu = describe_gpu(options.python, env)
        env |= preload(options.python, env)
        print(f"test-gpu: {options.wheel.name} on {gpu}", flush=True)
        prepared = time.monotonic()
        for name in chosen:
            part = PARTS[name]
            limit = min(part.limit, options.limit - (time.monotonic() - prepared))
            if limit <= 0:
                results[name] = Result(note="not run: no time was left")
                continue
            print(f"==> {name}", flush=True)
            with contextlib.ExitStack() as stack:
                # A hardware queue for each of up to 32 virtual ranks. (Eight processes under MPS cannot have so many.)
                more = {} if part.processes else {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
                # Ranks that hang are told of, with their stacks, while there is time for it.
                patience = {"GPUSYNC_TEST_PATIENCE": str(0.6 * limit)}
                if part.mps:
                    more = {**stack.enter_context(mps(Path(folder))), "GPUSYNC_TEST_SHARING": "mps"}
                if part.own_gpus:
                    count = count_gpus(options.python, env)
                    if count < 2:
                        stop(f"part {name} needs two GPUs, and torch sees {count}")
                    more = {"GPUSYNC_TEST_SHARING": "none", "GPUSYNC_TEST_RANKS": str(min(count, 3))}
                results[name] = run_part(
                    name, part, options.python, {**env, **more, **patience}, log, limit, options.select
                )
    print(f"\n{gpu}")
    print(f"{'part':<12}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for name, result in results.items():
        print(f"{name:<12}{result.passed:>8}{result.failed:>8}{result.seconds:>9.0f}  {result.note}".rstrip())
    total = time.monotonic() - started
    print(
        f"{'all':<12}{sum(r.passed for r in results.values()):>8}{sum(r.failed for r in results.values()):>8}{total:>9.0f}"
    )
    return 1 if any(result.failed or result.note or not result.passed for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

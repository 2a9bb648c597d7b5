"""The run on several GPUs of one host: `make test-multigpu PYTHON=... WHEEL=... [RANKS=...] [OUT=...]`.

With a GPU for each rank: the tests whose ranks are processes, the figures beside SymmetricMemory and NCCL, and a tuning
table. On a machine with fewer GPUs than ranks the same command runs with ranks that share them, under MPS: how it is
tried out. Tables, plots and logs go to OUT. Every step is a process under a time limit; the exit code is 0 only when all
of them succeeded. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import run_gpu_tests

HERE = Path(__file__).resolve().parent
MULTICAST_OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


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
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    bench = [options.python, "-m", "torch_gpusync", "bench", "--device", "cuda", "--ranks", options.ranks]
    with tempfile.TemporaryDirectory(prefix="gpusync-multigpu-") as folder:
        run_gpu_tests.unpack(options.wheel, Path(folder), options.python)
        env = {
            **os.environ,
            **MULTICAST_OFF,
            "PYTHONPATH": folder,
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
        }
        figures = ["--rounds", "7", "--sample", "0.02"]
        steps = {
            "tests": (
                [
                    *(options.python, str(HERE / "run_gpu_tests.py"), "--python", options.python),
                    *("--wheel", str(options.wheel), "--part", "mps", "--log", str(out / "tests.log")),
                ],
                200,
            ),
            "barrier": ([*bench, "--ops", "barrier", *figures, "--json", str(out / "barrier.json")], 60),
            "all_reduce": (
                [
                    *(*bench, "--ops", "all_reduce", "--sizes", options.sizes, *figures),
                    *("--json", str(out / "all_reduce.json"), "--plot", str(out / "all_reduce.png")),
                ],
                150,
            ),
            "decode": ([*bench, "--ops", "decode", *figures, "--json", str(out / "decode.json")], 120),
            "tune": ([*bench, "--tune", str(out / "tuning.json")], 100),
        }
        results = {}
        for name, (command, limit) in steps.items():
            started = time.monotonic()
            print(f"######## {name}", flush=True)
            with open(out / f"{name}.txt", "w") as output:
                try:
                    code = subprocess.run(
                        command, env=env, stdout=output, stderr=subprocess.STDOUT, timeout=limit
                    ).returncode
                except subprocess.TimeoutExpired:
                    code = -1
            lines = (out / f"{name}.txt").read_text(errors="replace").splitlines()
            print("\n".join(line[:160] for line in lines[-45:]), flush=True)
            results[name] = ("passed" if code == 0 else f"FAILED ({code})", time.monotonic() - started)
    print(
        "\n".join(f"{name:12} {verdict:14} {seconds:5.0f} s" for name, (verdict, seconds) in results.items())
    )
    return int(any(verdict != "passed" for verdict, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())

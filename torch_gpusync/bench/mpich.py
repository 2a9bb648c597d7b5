"""An optional peer: MPI's own calls in a C loop, with whatever MPI the machine has (MPICH by preference).

Its ranks are processes that ``mpiexec`` starts, so they cannot take turns with ours sample by sample: they
run before and after them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from .plan import Case
from .timing import Sampling, Series

_LIMIT_S = 30.0  # of a run, beside the time of its samples
_SOURCE = Path(__file__).with_name("mpi_loop.c")


class MpiError(RuntimeError):
    """The C loop could not be built or run."""


class Mpi:
    """The compiled loop."""

    def __init__(self, folder: Path) -> None:
        """Compile it into ``folder``. Raises MpiError with the way out when the machine has no MPI."""
        compiler, self._mpiexec = find("mpicc"), find("mpiexec")
        if compiler is None or self._mpiexec is None:
            raise MpiError(
                "no mpicc and mpiexec on PATH (Debian, Ubuntu: apt-get install mpich libmpich-dev)"
            )
        self.name = "mpich" if "mpich" in _output(self._mpiexec, "--version").lower() else "mpi"
        self._program = folder / "mpi_loop"
        built = subprocess.run(
            [compiler, "-O2", "-o", self._program, _SOURCE],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if built.returncode != 0:
            raise MpiError(f"mpicc failed: {built.stderr.strip()}")

    def run(self, ranks: int, cases: Sequence[Case], sampling: Sampling) -> dict[Case, Series]:
        """One series per case; its samples are the slowest rank's. Raises MpiError."""
        command = [
            str(self._mpiexec),
            "-n",
            str(ranks),
            str(self._program),
            str(sampling.rounds),
            str(sampling.sample_s),
        ]
        command += [f"{case.op}:{case.nbytes}" for case in cases]
        limit = _LIMIT_S + 20 * len(cases) * (sampling.rounds + 2) * sampling.sample_s
        # A session of its own: mpiexec's ranks are ended with it.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                output, errors = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                raise MpiError(f"{self.name} did not end within {limit:.1f} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise MpiError(f"{self.name} ended with exit code {process.returncode}: {errors.strip()}")
        return self._parse(output)

    def _parse(self, output: str) -> dict[Case, Series]:
        samples: defaultdict[Case, list[float]] = defaultdict(list)
        calls: dict[Case, int] = {}
        for line in output.splitlines():
            op, nbytes, n, microseconds = line.split()
            case = Case(op, int(nbytes))
            samples[case].append(float(microseconds))
            calls[case] = int(n)
        return {
            case: Series(case.op, self.name, "eager", True, calls[case], values)
            for case, values in samples.items()
        }


def find(program: str) -> str | None:
    """MPICH's program of this name where several MPIs are installed, else the one on PATH."""
    return shutil.which(f"{program}.mpich") or shutil.which(program)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout

"""The benchmark as a program, and its peer in C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_gpusync.bench import cli, plan
from torch_gpusync.bench.launcher import Context
from torch_gpusync.bench.mpich import Mpi, MpiError
from torch_gpusync.bench.plan import Case
from torch_gpusync.bench.results import read_json
from torch_gpusync.bench.timing import Sampling, Series

_KEYS = {"op", "impl", "device", "ranks", "bytes", "mode", "median_us", "p99_us", "iterations"}


def _bench(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the program outside the source tree, with no MPI on PATH unless ``path`` has one."""
    return subprocess.run(
        [sys.executable, "-m", "torch_gpusync", "bench", *arguments],
        cwd="/",
        env={**os.environ, "PATH": path or "/nowhere"},
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )


# ---- the program


@pytest.mark.limit(300)
def test_all_of_it(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = _bench("--quick", "--rounds", "2", "--ranks", "1,3", "--sizes", "4K,6000", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    entries = json.loads(figures.read_text())
    assert {frozenset(entry) for entry in entries} == {frozenset(_KEYS)}
    found = {(e["op"], e["impl"], e["ranks"], e["bytes"], e["mode"]) for e in entries}
    expected = set()
    for ranks in (1, 3):
        expected |= {("barrier", impl, ranks, 0, "eager") for impl in ("gloo", "gpusync", "SyncGroup")}
        expected |= {("nothing", "gpusync", ranks, 0, "eager")}
        for size in (4096, 6000):
            expected |= {
                ("all_reduce", impl, ranks, size, "eager") for impl in ("gloo", "gpusync", "SyncGroup")
            }
    assert found == expected
    assert len(entries) == len(expected)
    for entry in entries:
        assert entry["device"] == "cpu"
        assert 0 < entry["median_us"] <= entry["p99_us"]
        assert entry["iterations"] >= 6
    # One table on stdout, all else on stderr.
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "op",
        "ranks",
        "bytes",
        "mode",
        "impl",
        "median",
        "µs",
        "p99",
        "µs",
        "vs",
        "gloo",
        "vs",
        "nothing",
    ]
    assert len(lines) == 2 + len(entries)
    assert "MPI is not among the peers: no mpicc and mpiexec on PATH" in done.stderr
    assert "apt-get install mpich" in done.stderr


@pytest.mark.limit(300)
def test_the_other_collectives() -> None:
    ops = "all_gather,reduce_scatter,broadcast,all_to_all"
    done = _bench("--quick", "--rounds", "1", "--ranks", "3", "--sizes", "6000", "--ops", ops)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    found = [(words[0], impl) for words in lines for impl in words if impl in ("gloo", "SyncGroup")]
    assert sorted(found) == sorted((op, impl) for op in ops.split(",") for impl in ("gloo", "SyncGroup"))


@pytest.mark.limit(300)
def test_compiled_calls() -> None:
    path = os.environ["PATH"]  # Inductor wants a compiler
    done = _bench(
        "--quick", "--rounds", "1", "--ranks", "2", "--sizes", "4K", "--modes", "compile", path=path
    )
    assert done.returncode == 0, done.stderr
    ours = [line.split() for line in done.stdout.splitlines() if "gpusync" in line]
    assert [(words[0], "compile" in words) for words in ours] == [("barrier", True), ("all_reduce", True)]


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        done = _bench("--device", "cuda", "--quick")
        assert done.returncode == 0 or "no CUDA kernels" in done.stderr
        return
    done = _bench("--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bench --device cuda: no GPU" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "gather"], "unknown op 'gather': choose from barrier, all_reduce"),
        (["--ops", "decode"], "decode is measured on GPUs only"),
        (["--nccl-symmetric"], "--nccl-symmetric is for GPUs"),
        (["--modes", "lazy"], "unknown mode 'lazy'"),
        (["--ranks", "65"], "ranks are 1 to 64"),
        (["--sizes", "3"], "multiples of 4 bytes"),
        (["--sizes", "many"], "invalid literal"),
        (["--rounds", "-1"], "must be positive"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def _fails_at_two(context: Context, argument: plan.Plan) -> list[Any]:
    if context.world_size == 2:
        raise ValueError("out of order")
    return [(case, [Series(case.op, "gpusync", "eager", False, 10, [1.0])]) for case in argument.cases]


def test_what_was_measured_before_a_failure_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "run_rank", _fails_at_two)
    monkeypatch.setenv("PATH", "/nowhere")
    figures = tmp_path / "figures.json"
    assert cli.main(["--ranks", "1,2", "--ops", "barrier", "--json", str(figures)]) == 1
    assert [m.ranks for m in read_json(figures)] == [1]
    printed = capsys.readouterr()
    assert "raised ValueError: out of order" in printed.err
    assert "in _fails_at_two" in printed.err


# ---- MPI


def _install(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def _fake_mpi(folder: Path, monkeypatch: pytest.MonkeyPatch, mpiexec: str, mpicc: str = 'touch "$3"') -> Mpi:
    _install(folder, "mpicc", mpicc)
    _install(folder, "mpiexec", f'[ "$1" = --version ] && {{ echo "HYDRA, MPICH 4"; exit; }}\n{mpiexec}')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("torch_gpusync.bench.mpich.find", lambda program: str(folder / program))
    return Mpi(folder)


def test_mpi_output_becomes_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = _fake_mpi(
        tmp_path, monkeypatch, 'echo "barrier 0 500 1.5"; echo "barrier 0 500 2.5"; echo "all_reduce 64 20 9"'
    )
    series = mpi.run(2, [Case("barrier"), Case("all_reduce", 64)], Sampling(2, 0.01))
    assert series == {
        Case("barrier"): Series("barrier", "mpich", "eager", True, 500, [1.5, 2.5]),
        Case("all_reduce", 64): Series("all_reduce", "mpich", "eager", True, 20, [9.0]),
    }


def test_mpi_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = _fake_mpi(tmp_path, monkeypatch, "echo wrong sum >&2; exit 3")
    with pytest.raises(MpiError, match="mpich ended with exit code 3: wrong sum"):
        mpi.run(2, [Case("barrier")], Sampling(1, 0.01))
    with pytest.raises(MpiError, match="mpicc failed: no such option"):
        _fake_mpi(tmp_path, monkeypatch, "true", mpicc="echo no such option >&2; exit 1")
    monkeypatch.setattr("torch_gpusync.bench.mpich._LIMIT_S", 0.5)
    mpi = _fake_mpi(tmp_path, monkeypatch, "sleep 60")
    with pytest.raises(MpiError, match="did not end within"):
        mpi.run(2, [], Sampling(1, 0.01))


def test_the_loop_in_c(tmp_path: Path) -> None:
    """With a real MPI where there is one; elsewhere it is still compiled, against its declarations."""
    try:
        mpi = Mpi(tmp_path)
    except MpiError as error:
        assert "no mpicc" in str(error)
        (tmp_path / "mpi.h").write_text(_MPI_H)
        source = Path(cli.__file__).with_name("mpi_loop.c")
        subprocess.run(
            ["cc", "-fsyntax-only", "-Wall", "-Werror", f"-I{tmp_path}", source], check=True, timeout=60
        )
        return
    cases = [Case("barrier"), Case("all_reduce", 4096)]
    series = mpi.run(2, cases, Sampling(2, 0.005))
    assert list(series) == cases
    for each in series.values():
        assert len(each.samples_us) == 2
        assert all(value > 0 for value in each.samples_us)


_MPI_H = """
typedef int MPI_Comm, MPI_Datatype, MPI_Op;
enum { MPI_COMM_WORLD, MPI_FLOAT, MPI_DOUBLE, MPI_SUM, MPI_MAX };
int MPI_Init(int *, char ***), MPI_Finalize(void), MPI_Barrier(MPI_Comm), MPI_Abort(MPI_Comm, int);
int MPI_Comm_rank(MPI_Comm, int *), MPI_Comm_size(MPI_Comm, int *);
int MPI_Allreduce(const void *, void *, int, MPI_Datatype, MPI_Op, MPI_Comm);
double MPI_Wtime(void);
"""

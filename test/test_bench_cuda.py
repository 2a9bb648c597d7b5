"""The GPU half of the benchmark as far as it needs no GPU: what is measured, what is left out, how figures are combined; and
the run on several GPUs, with a stand-in for everything that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_gpusync import SyncGroup, virtual_ranks
from torch_gpusync.bench import cli, cuda, cuda_exchange, cuda_peers, decode, latency, launcher, plan, tune
from torch_gpusync.bench.cuda_peers import Peers
from torch_gpusync.bench.plan import EXCHANGES, Case, Plan
from torch_gpusync.bench.results import Measurement, with_best_of
from torch_gpusync.bench.timing import Sampling, Series, Subject
from torch_gpusync.testing import run_threads

N = 3


def _planned(*arguments: str) -> tuple[Plan, list[int]]:
    return cli._plan(cli._parser().parse_args(["--device", "cuda", *arguments]))


# ---- what is measured


def test_every_collective_is_measured_on_gpus() -> None:
    found, ranks = _planned("--ops", ",".join(("barrier", *EXCHANGES)), "--sizes", "8K,4M")
    assert found.cases == (Case("barrier"), *(Case(op, size) for op in EXCHANGES for size in (8192, 4 << 20)))
    assert (ranks, found.nccl_symmetric) == ([2, 4, 8], False)
    assert _planned("--nccl-symmetric")[0].nccl_symmetric


class _PlainPeers:
    """Symmetric memory of virtual ranks: each one's buffer, and gpusync's barrier for SymmetricMemory's."""

    has_nccl = False

    def __init__(self, sync: SyncGroup, buffers: list[torch.Tensor]) -> None:
        self.buffer, self._buffers = buffers[sync.rank], buffers
        self.barrier = sync.barrier

    def of_rank(self, rank: int, numel: int) -> torch.Tensor:
        return self._buffers[rank][:numel]

    def two_shot_works(self, nbytes: int) -> bool:
        return True


def _capture(op: str, impl: str, call: Callable[[], Any], is_peer: bool) -> Subject:
    return Subject(op, impl, call, "graph", is_peer)


def _attempt(impl: str, make: Callable[[], Subject]) -> list[Subject]:
    return [make()]


@pytest.mark.parametrize("op", EXCHANGES)
def test_exchanges_and_their_peers_are_checked_with_fresh_data(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    nbytes = 6000
    buffers = [torch.zeros(nbytes // 2, dtype=torch.bfloat16) for _ in range(N)]
    ranks = virtual_ranks(N, timeout=60)

    def run(rank: int) -> list[str]:
        sync = ranks[rank]
        peers: Any = _PlainPeers(sync, buffers)
        found = cuda_exchange.subjects(Case(op, nbytes), sync, peers, _capture, _attempt)
        for subject in found:
            subject.refresh()
            subject.call()
            subject.check()
            subject.check()
        # The check is one: of the call's result spoilt on rank 1, or of data that it has not seen.
        whole = found[-1].check.args[0]  # type: ignore[attr-defined]
        data = found[-1].refresh.args[0]  # type: ignore[attr-defined]
        spoilt = partial(lambda: whole() + (rank == 1))
        if rank == 1:
            with pytest.raises(AssertionError):
                data.check(spoilt)
        else:
            data.check(spoilt)
        return [subject.impl for subject in found]

    try:
        impls = run_threads(run, N)
    finally:
        for sync in ranks:
            sync.close()
    copies = [] if op == "reduce_scatter" else ["symm_mem copies", "symm_mem copies, copied"]
    assert impls == [[*copies, "gpusync"]] * N  # SymmetricMemory's reduce_scatter takes 2, 4 or 8 ranks


def test_two_shot_is_left_out_where_it_fails() -> None:
    peers = Peers.__new__(Peers)
    for ranks_on_gpu, nbytes, works in ((8, 4 << 20, False), (8, 512 << 10, True), (4, 4 << 20, True)):
        peers._ranks_on_gpu = ranks_on_gpu
        assert peers.two_shot_works(nbytes) == works


def test_symm_mem_is_left_out_of_a_decode_step_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "subjects", lambda *_: [])
    peers, what = Peers.__new__(Peers), plan.Plan((), Sampling())
    for ranks_on_gpu, nbytes, works in ((8, 256 << 10, False), (8, 64 << 10, True), (4, 256 << 10, True)):
        peers._ranks_on_gpu = ranks_on_gpu
        said: list[str] = []
        sync: Any = None
        cuda._subjects(Case("decode", nbytes), what, sync, peers, said.append)
        assert said == (
            [] if works else ["symm_mem is left out: it fails at 256 KiB with so many ranks on a GPU"]
        )


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_peer_that_cannot_be_captured_is_left_out_on_all_ranks(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "greatest", lambda value: 1.0 if elsewhere else value)
    said: list[str] = []

    def fails() -> Subject:
        raise ValueError("no such variant\nand more")

    made = Subject("all_reduce", "peer", lambda: None)
    assert cuda._attempt(said.append, "peer", lambda: made) == ([] if elsewhere else [made])
    assert cuda._attempt(said.append, "other", fails) == []
    assert said[-1] == "other is left out: ValueError: no such variant"
    assert ("peer is left out: another rank failed" in said) == elsewhere


def test_decode_measures_nccl_only_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_subject", lambda impl, *rest: Subject("decode", impl, lambda: None))
    sync: Any = SimpleNamespace(all_reduce=None, device="cpu")
    ours = ["gpusync", "gpusync all_reduce_rms_norm", "without all_reduce"]
    for has_nccl in (False, True):
        peers: Any = SimpleNamespace(has_nccl=has_nccl, group_name="0", buffer=torch.zeros(decode.HIDDEN))
        peers.copy_works_in_a_step = lambda nbytes: nbytes == 2 * decode.HIDDEN
        found = decode.subjects(Case("decode", 2 * decode.HIDDEN), sync, peers, _attempt)
        assert [s.impl for s in found] == ["nccl"] * has_nccl + ["symm_mem", *ours]
    peers.copy_works_in_a_step = lambda nbytes: False
    found = decode.subjects(Case("decode", 2 * decode.HIDDEN), sync, peers, _attempt)
    assert [s.impl for s in found] == ["nccl", *ours]


def test_nccl_shares_a_gpu_where_it_can_and_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ((2, 28, 9), (2, 30, 7)):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
        for told in ("0", "1"):
            monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)
            assert cuda_peers.nccl_works(1)
            assert cuda_peers.nccl_works(2) == (version >= (2, 30) and told == "1")


# ---- tuning


def test_an_algorithm_is_given_up_when_it_is_far_behind_and_not_catching_up() -> None:
    algos = {"fast": [(1, 1), (2, 2)], "slow": [(1, 1)], "catching up": [(1, 1)]}

    def timed(**best: float) -> list[tuple[float, str, int, int]]:
        return [(t + 9 * (b - 1), a, b, c) for a, t in best.items() for b, c in algos[a.replace("_", " ")]]

    first = [(t, a.replace("_", " "), b, c) for t, a, b, c in timed(fast=1.0, slow=3.5, catching_up=5.0)]
    kept, behind = tune._drop_hopeless(algos, first, {})
    assert kept == algos and behind == {"fast": 1.0, "slow": 3.5, "catching up": 5.0}
    second = [(t, a.replace("_", " "), b, c) for t, a, b, c in timed(fast=2.0, slow=7.0, catching_up=8.0)]
    kept, behind = tune._drop_hopeless(kept, second, behind)
    assert list(kept) == ["fast", "catching up"] and kept["fast"] == algos["fast"]
    assert behind == {"fast": 1.0, "slow": 3.5, "catching up": 4.0}


# ---- round trips


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_round_trips(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, bool]] = []

    def ping_pong(token: Any, name: str, peer: int, first: int, rounds: int, fence: bool) -> torch.Tensor:
        assert (peer, rounds) == (1 - rank, 1000)
        calls.append((first, first + rounds, fence))
        return torch.tensor([-1 if fence and len(calls) == 4 else 1_250_000])

    monkeypatch.setattr(latency, "ops", SimpleNamespace(_cuda_ping_pong=ping_pong))
    sync: Any = SimpleNamespace(rank=rank, world_size=3, token=None, name="g")
    said: list[str] = []
    found = latency.round_trips(sync, 2, lambda: None, lambda value: value, said.append)
    if rank == 2:
        assert [s.samples_us for s in found] == [[0.0, 0.0]] * 2 and not calls  # the others' count
        return
    assert [(s.op, s.impl, s.mode, s.samples_us) for s in found] == [
        ("round trip", "gpusync relaxed", "kernel", [1.25, 1.25])
    ]
    assert any("release/acquire is left out" in text for text in said)
    ends = [(first, last) for first, last, _ in calls]
    assert all(last < first for (_, last), (first, _) in pairwise(ends)), "numbers are new"
    sync.world_size = 1
    assert latency.round_trips(sync, 2, lambda: None, lambda value: value, said.append) == []


def test_the_op_needs_a_cuda_token() -> None:
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.gpusync._cuda_ping_pong(torch.zeros(1, dtype=torch.int32), "g", 1, 1, 10, False)


# ---- figures and progress


def test_figures_of_gpus_are_combined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ranks(worker: Any, n: int, plan: Plan, on_progress: Callable[[str], None]) -> Any:
        results = []
        for r in range(n):
            of_rank = []
            for case in plan.cases:
                if r == 0:
                    for text in ("warming up", "round 1 of 2", "round 2 of 2"):
                        on_progress(f"{case}: {text}")
                impls = [
                    ("nccl", 8.0),
                    ("symm_mem copies", 3.0),
                    ("symm_mem copies, copied", 4.0),
                    ("gpusync", 1.0),
                ]
                of_rank.append(
                    (
                        case,
                        [
                            Series(case.op, impl, "graph", impl != "gpusync", 10, [us + r])
                            for impl, us in impls
                        ],
                    )
                )
            results.append(of_rank)
        return results

    monkeypatch.setattr(cli, "launch", ranks)
    monkeypatch.setattr(plan, "gpus", lambda: "two GPUs")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    what, _ = _planned("--ops", "all_gather,reduce_scatter", "--sizes", "8K")
    figures: list[Measurement] = []
    cli._measure_on_gpus([2], what, cli._Progress(), figures)
    found = {(m.op, m.impl): (m.bytes, m.median_us) for m in with_best_of(figures, "symm_mem")}
    assert found["all_gather", "gpusync"] == (8192, 2.0), "the slowest rank counts"
    assert found["reduce_scatter", "symm_mem"] == (8192, 4.0), "the best of its variants"
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("2 ranks, ")] == [
        "2 ranks, all_gather 8 KiB: warming up",
        "2 ranks, all_gather 8 KiB: round 1 of 2",
        "2 ranks, reduce_scatter 8 KiB: warming up",
        "2 ranks, reduce_scatter 8 KiB: round 1 of 2",
    ], "a log says where a run hung"


def test_a_failure_leaves_the_figures_of_fewer_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ranks(worker: Any, n: int, what: Any, **_: Any) -> Any:
        if n == 4:
            raise launcher.RankFailure("rank 3 raised RuntimeError")
        return [[(case, [Series(case.op, "gpusync", "graph", False, 10, [2.0])]) for case in what.cases]] * n

    monkeypatch.setattr(cli, "launch", ranks)
    monkeypatch.setattr(cli, "_obstacle", lambda device: "")
    monkeypatch.setattr(plan, "gpus", lambda: "two GPUs")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    file = tmp_path / "figures.json"
    assert cli.main(["--device", "cuda", "--ranks", "2,4,8", "--ops", "barrier", "--json", str(file)]) == 1
    assert [m["ranks"] for m in json.loads(file.read_text())] == [2]
    assert "rank 3 raised" in capsys.readouterr().err


# ---- the run on several GPUs

_RUNNER = Path(__file__).parent / "cuda" / "run_multigpu.py"

# Stands in for the Python whose torch is used: two GPUs, tests that fail, all-gathers that hang.
_STAND_IN = """#!/bin/sh
case "$*" in
  *device_count*) echo 2 ;;
  *read_json*) exec {python} "$@" ;;
  *run_gpu_tests*) echo "limit $7"; exit 3 ;;
  *--tune*) echo "with ${{GPUSYNC_TUNING-none}}" ;;
  *all_gather*) echo gathering; exec sleep 100 ;;
  *all_reduce*) echo "with $GPUSYNC_TUNING" ;;
  *barrier*) echo "$TORCH_SYMM_MEM_DISABLE_MULTICAST$NCCL_NVLS_ENABLE"; cp {figures} {out}/barrier.json ;;
esac
"""


@pytest.mark.limit(120)
def test_the_run_on_several_gpus_ends_in_time(tmp_path: Path) -> None:
    from torch_gpusync.bench.results import Measurement, write_json

    out, figures, wheel = tmp_path / "out", tmp_path / "figures.json", tmp_path / "some.whl"
    write_json([Measurement("barrier", "gpusync", "cuda", 2, 0, "graph", 2.5, 3.0, 100)], figures)
    zipfile.ZipFile(wheel, "w").close()
    stand_in = tmp_path / "python"
    stand_in.write_text(_STAND_IN.format(python=sys.executable, figures=figures, out=out))
    stand_in.chmod(0o755)
    started = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, str(_RUNNER), "--python", str(stand_in), "--wheel", str(wheel)),
            *("--out", str(out), "--skip", "decode", "--limit", "12"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={k: v for k, v in os.environ.items() if k != "GPUSYNC_TUNING"}
        | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"},
    )
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - started < 60
    verdicts = {line.split()[0]: line for line in done.stdout.splitlines()[-8:]}
    assert "FAILED (3)" in verdicts["tests"]
    assert (out / "tests.txt").read_text() == "limit 5\n", "the tests end by themselves before they are ended"
    assert "passed" in verdicts["barrier"] and "passed" in verdicts["all_reduce"]
    assert "passed" in verdicts["tune"] and "ENDED" in verdicts["exchanges"]
    assert all("NOT RUN" in verdicts[name] for name in ("compile", "nccl_symmetric"))
    assert "decode" not in verdicts
    assert (out / "tune.txt").read_text() == "with none\n"
    assert (out / "all_reduce.txt").read_text() == f"with {out / 'tuning.json'}\n"
    assert (out / "exchanges.txt").read_text() == "gathering\n"
    assert (out / "barrier.txt").read_text() == "10\n", "NVLink multicast stays off"
    assert "2.50" in (out / "figures.txt").read_text() and "2.50" in done.stdout
    wrong = subprocess.run(
        [sys.executable, str(_RUNNER), "--python", str(stand_in), "--wheel", str(wheel), "--skip", "all"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert wrong.returncode == 2 and "there is no step all" in wrong.stderr


def test_the_steps_take_less_than_eight_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_RUNNER.parent))
    import run_multigpu

    options = SimpleNamespace(python="python", wheel=Path("w"), ranks="2", sizes="1K", exchange_sizes="8K")
    for gpus, part in ((1, "mps"), (2, "gpus")):
        steps = run_multigpu.steps(options, gpus, Path("out"))
        assert sum(step.limit for step in steps.values()) + 2 * run_multigpu.GRACE < 480
        assert part in steps["tests"].command

"""The doctor: its report, as text and as JSON, on a sound machine and on ones that lack something."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import torch_gpusync
from torch_gpusync.bench import launcher
from torch_gpusync.bench.launcher import Context, RankFailure
from torch_gpusync.doctor import Finding, cli, examine, machine, main, self_test

_SECTIONS = ["versions", "library", "devices", "memory", "processes", "self-test"]


def _doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_gpusync", "doctor", *arguments],
        cwd="/",
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_sound_machine() -> None:
    done = _doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [Finding(**entry) for entry in json.loads(done.stdout)]
    assert list(dict.fromkeys(f.section for f in findings)) == _SECTIONS
    assert {f.status for f in findings} <= {"ok", "note", "unknown"}
    values = {f.name: f.value for f in findings}
    assert values["torch"] == torch.__version__
    assert values["torch_gpusync"] == torch_gpusync.__version__
    assert "barrier" in values["ops"]
    assert values["two ranks"].startswith("met and summed right")
    assert all(float(values[name].split()[0]) > 0 for name in ("barrier", "all_reduce of 4 KiB"))


def test_the_report_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def small() -> Iterator[Finding]:
        yield Finding("memory", "free", "note", "1 MiB", "find more")
        yield Finding("memory", "swap", "ok", "none")

    monkeypatch.setattr(cli, "_PROBES", {"memory": small})
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "memory",
        "  free                     [note] 1 MiB",
        "                           -> find more",
        "  swap                     none",
        "gpusync works here",
    ]


def test_a_bad_finding_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        cli, "_PROBES", {"x": lambda: iter([Finding("x", "y", "bad", "gone", "bring it back")])}
    )
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "gpusync cannot work here: 1 bad finding(s)"


def test_a_probe_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_off() -> Iterator[Finding]:
        yield Finding("devices", "cpu cores", "ok", "2")
        raise ZeroDivisionError("no\ncores")

    monkeypatch.setattr(cli, "_PROBES", {"devices": breaks_off, "memory": machine.memory})
    findings = examine()
    assert findings[:2] == [
        Finding("devices", "cpu cores", "ok", "2"),
        Finding("devices", "probe", "unknown", "failed: ZeroDivisionError: no cores"),
    ]
    assert findings[2].section == "memory", "the other probes still run"


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_a_library_that_does_not_load(damage: str, tmp_path: Path) -> None:
    package = Path(torch_gpusync.__file__).parent
    copy = tmp_path / "torch_gpusync"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "_C*"))
    if damage == "broken":
        (copy / "_C.so").write_bytes(b"not a library")
    # -S leaves out the .pth files, and with them an editable install of the sound library.
    paths = [
        str(tmp_path),
        sysconfig.get_path("purelib"),
        *(p for p in sys.path if p.endswith("site-packages")),
    ]
    done = subprocess.run(
        [sys.executable, "-S", "-m", "torch_gpusync", "doctor"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "gpusync cannot work here" in done.stdout
    assert "-> " in done.stdout
    line = "[bad] not found" if damage == "missing" else "[bad] ImportError"
    assert line in done.stdout
    # Elsewhere the error is as loud as ever.
    plain = subprocess.run(
        [sys.executable, "-S", "-c", "import torch_gpusync"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert plain.returncode == 1
    assert "ImportError" in plain.stderr


def _statuses(findings: Iterator[Finding]) -> dict[str, tuple[str, bool]]:
    return {f.name: (f.status, bool(f.advice)) for f in findings}


def _not_permitted(*_: object) -> NoReturn:
    raise PermissionError(1, "Operation not permitted")


def test_without_either_kind_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _not_permitted)
    statuses = _statuses(machine.memory())
    assert statuses["anonymous shared memory"] == ("note", True)
    assert statuses["/dev/shm"][0] == "ok"
    monkeypatch.setattr(os, "statvfs", _not_permitted)
    assert _statuses(machine.memory())["/dev/shm"] == ("bad", True)


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gpusync.memory.free_bytes", lambda: 5 << 20)
    assert _statuses(machine.memory())["free"] == ("note", True)
    monkeypatch.setattr("torch_gpusync.memory.free_bytes", lambda: None)
    assert _statuses(machine.memory())["free"][0] == "unknown"


def test_few_and_busy_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    monkeypatch.setattr(machine, "_cpu_quota", lambda: 0.5)
    statuses = _statuses(machine.devices())
    assert statuses["cpu cores"] == statuses["load average"] == statuses["cpu quota"] == ("note", True)


def test_a_peer_that_may_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _statuses(machine.processes())["a peer's memory"] == ("ok", False)
    monkeypatch.setattr(machine, "_OPEN_PEERS_FILE", "import os\nprint(os.strerror(13))")
    (refused,) = [f for f in machine.processes() if f.name == "a peer's memory"]
    assert (refused.status, refused.value) == ("note", "cannot be opened through /proc: Permission denied")
    assert "/dev/shm" in refused.advice


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        ("rank 0 raised SyncError: not enough memory", "more memory"),
        ("rank 1 raised SyncTimeoutError: waited 30 s", "look at the load"),
        ("rank 1, without a result, was killed by SIGILL", "the ranks run, but not the library"),
    ],
)
def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch, failure: str, advice: str) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RankFailure(failure)

    monkeypatch.setattr(launcher, "launch", fail)
    (finding,) = self_test.self_test()
    assert (finding.status, finding.value) == ("bad", failure)
    assert advice in finding.advice


def test_a_wrong_sum_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test can fail: its body, with an all-reduce that returns its input."""
    monkeypatch.setattr(Context, "init_process_group", _only_rank)
    monkeypatch.setattr(torch_gpusync.SyncGroup, "all_reduce", lambda self, x: x + 1)
    context = Context(0, 1, 30.0, 0, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="wrong sum"):
        self_test.two_ranks(context, None)


def _only_rank(self: Context) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

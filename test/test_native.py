"""The CPU protocol without torch, under stress; and wrong designs, each of which has to be noticed.

native/ is the stress program; mutants.py lists the wrong designs. Everything here is short: native/soak.sh runs the same
program for as long as you like, native/run_sanitizers.sh under every sanitizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import mutants
import pytest
from native_programs import NATIVE, Programs, Recipe, run

# What the protocol must withstand. `seconds` bounds each run on slow machines, `rounds` on fast ones. `cores=64` makes ranks
# believe that each has a core of its own, so that their waits spin.
RUNS = (
    "barriers ranks=2 rounds=300000",
    "barriers ranks=3 rounds=300000",
    "barriers ranks=3 rounds=100000 cores=64 disturb_us=50",
    "barriers ranks=3 rounds=100000 delay_us=300 disturb_us=1000 preset=0xFFFFFFF0",
    "barriers ranks=8 rounds=20000 delay_us=100 disturb_us=300",
    "barriers ranks=40 rounds=500 disturb_us=100",
    "barriers ranks=64 rounds=300 delay_us=100",
    "barriers ranks=3 processes=1 rounds=200000",
    "barriers ranks=3 processes=1 rounds=100000 delay_us=300 disturb_us=1000 preset=0xFFFFFFF0",
    "barriers ranks=8 processes=1 rounds=10000 delay_us=100",
    "pulls ranks=3 rounds=50000 delay_us=300 disturb_us=1000 preset=0xFFFFFFF0",
    "signals ranks=3 rounds=20000 delay_us=100 disturb_us=500 preset=0xFFFFFFF0",
    "signals ranks=4 processes=1 rounds=20000",
    "pushes ranks=3 rounds=20000 delay_us=200 disturb_us=500 preset=0xFFFFFFF0",
    "pushes ranks=3 processes=1 rounds=20000 disturb_us=500",
    "all_reduces ranks=3 rounds=5000 disturb_us=500 preset=0xFFFFFFF1",
    "all_reduces ranks=3 processes=1 rounds=5000 delay_us=100",
    "exchanges ranks=3 rounds=3000 disturb_us=500 preset=0xFFFFFFF1",
    "exchanges ranks=4 processes=1 rounds=3000 delay_us=100",
    "mixed ranks=3 rounds=20000 delay_us=100 disturb_us=500 preset=0xFFFFFFF0",
    "mixed ranks=5 processes=1 rounds=10000 disturb_us=500",
    "mixed ranks=64 rounds=50",
    "opening ranks=3 rounds=1000 delay_us=2000 disturb_us=500",
    "opening ranks=4 processes=1 rounds=1000 delay_us=2000",
    "closing ranks=3 rounds=2000 delay_us=300 disturb_us=500",
    "closing ranks=4 processes=1 rounds=2000 delay_us=300 disturb_us=500",
    "expiring ranks=3 rounds=70",
    "expiring ranks=4 processes=1 rounds=70 disturb_us=500",
    "mismatches ranks=3 rounds=500 delay_us=300 disturb_us=500",
    "mismatches ranks=4 processes=1 rounds=500 delay_us=300",
    "give_ups ranks=3 rounds=1500 disturb_us=300",
    "give_ups ranks=5 rounds=1000 disturb_us=300",
    "give_ups ranks=4 processes=1 rounds=1000 disturb_us=300",
    "resets ranks=3 rounds=500 delay_us=300 disturb_us=300 preset=0xFFFFFFF0",
    "resets ranks=4 processes=1 rounds=500 delay_us=300",
    "keeping ranks=3 rounds=300 delay_us=300 disturb_us=500",
)


# Which program a test asks for, where it is not the protocol as it is.
_WANTED = {"test_nobody_needs_to_be_quick": "pauses", "test_case_25_thread_sanitizer": "thread"}


def _recipe(name: str) -> Recipe:
    """`name`: "protocol" as it is, or with "pauses", or under the "thread" sanitizer, or a mutant's."""
    if name in mutants.MUTANTS:
        return Recipe.of(mutants.MUTANTS[name])
    return Recipe(mutants.PAUSES if name == "pauses" else (), ("thread",) if name == "thread" else ())


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    result = Programs(tmp_path_factory.mktemp("native"), NATIVE / "build.sh", _recipe)
    for item in request.session.items:  # what the selected tests will ask for, in their order
        if isinstance(item, pytest.Function) and item.path == Path(__file__):
            wanted = _WANTED.get(item.originalname, "protocol")
            result.start(
                str(item.callspec.params.get("name", wanted)) if hasattr(item, "callspec") else wanted
            )
    yield result
    result.stop()


@pytest.mark.parametrize("arguments", RUNS)
def test_stress(programs: Programs, arguments: str) -> None:
    done = run(programs.get("protocol"), f"{arguments} seconds=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("no mismatch")
    print(done.stdout, end="")


def test_case_01_a_million_barriers(programs: Programs) -> None:
    done = run(programs.get("protocol"), "barriers ranks=3 processes=1 rounds=1000000")
    assert done.returncode == 0 and "1000000 barriers, no mismatch" in done.stdout, done.stdout + done.stderr


def test_case_02_every_rank_is_late_at_random(programs: Programs) -> None:
    done = run(programs.get("protocol"), "barriers ranks=3 processes=1 rounds=100000 delay_us=30")
    assert done.returncode == 0 and "100000 barriers, no mismatch" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("workload", ["barriers", "mixed"])
def test_case_25_thread_sanitizer(programs: Programs, workload: str) -> None:
    """No report for the protocol as it is; mutants that lack an acquire or a release are reported (below)."""
    done = run(
        programs.get("thread"), f"{workload} ranks=3 rounds=1000000 seconds=2 delay_us=200 disturb_us=500"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", ["ranks=3", "ranks=4 processes=1 disturb_us=500"])
def test_the_wait_of_kernels(programs: Programs, ranks: str) -> None:
    """Eight scenes, of a rank that is late, that dies while it decides, ...: the same code as on a GPU, on threads."""
    done = run(programs.get("protocol"), f"kernels {ranks} rounds=8")
    assert done.returncode == 0, done.stderr


def test_nobody_needs_to_be_quick(programs: Programs) -> None:
    program = programs.get("pauses")
    for arguments in (
        f"{mutants.NAP_RUN} seconds=4 timeout=60 limit=10",
        f"{mutants.GIVE_UP_RUN} seconds=4",
        f"{mutants.GIVE_UP_RUN} seconds=4 processes=1 ranks=4",
    ):
        done = run(program, arguments)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutant_is_noticed(programs: Programs, name: str) -> None:
    mutant = mutants.MUTANTS[name]
    done = run(programs.get(name), mutant.run)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, 2), f"nothing noticed {name}: {said}"
    assert re.search(mutant.says, said), f"{name} was noticed, but not by '{mutant.says}':\n{said[:2000]}"


@pytest.mark.parametrize("meeting", [1, 2])
def test_a_reset_needs_both_meetings(programs: Programs, meeting: int) -> None:
    program = programs.get("protocol")
    done = run(program, f"resets seconds=20 rounds=1000000 delay_us=300 timeout=1 skip_meeting={meeting}")
    assert done.returncode == 1 and re.search("is broken|waited|does not match|wrong", done.stderr), (
        done.stderr
    )


def test_an_edit_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 places"):
        mutants.copy((mutants.Edit("cpu/wait.cpp", "no such text", ""),), tmp_path / "csrc")

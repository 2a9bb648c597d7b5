"""The GPU kernels of the collectives on the CPU, with a thread for each GPU thread, under sanitizers; and wrong designs.

native/collectives/ is the program: it compiles the kernels, controllers and waits of csrc/ for the host, runs random calls of
several ranks at their own pace, lets some groups break, and compares every output bit for bit. ThreadSanitizer judges the
memory order, AddressSanitizer and UndefinedBehaviorSanitizer the accesses. CUDA's headers are needed, and no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import collective_mutants
import pytest
from device_code import missing, tool
from native_programs import NATIVE, Programs, Recipe, run

_SANITIZERS = {"thread": ("thread",), "address": ("address", "undefined")}
RUNS = (
    "thread ranks=2",
    "thread ranks=3",
    "thread ranks=5 blocks=3 threads=2",
    "thread ranks=8 threads=2",
    "address ranks=1",
    "address ranks=2 blocks=3 threads=7",
    "address ranks=3 blocks=3",
    "address ranks=4",
    "address ranks=8",
)


def _recipe(name: str) -> Recipe:
    """`name`: a sanitizer's for the kernels as they are, or a mutant's."""
    if name in collective_mutants.MUTANTS:
        return Recipe.of(collective_mutants.MUTANTS[name])
    return Recipe((), _SANITIZERS[name])


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    nvcc = tool("nvcc", "CUDACXX")
    if nvcc is None:
        missing("nvcc is missing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDACXX", nvcc)
        script = NATIVE / "collectives" / "build.sh"
        result = Programs(tmp_path_factory.mktemp("collectives"), script, _recipe)
        for item in request.session.items:  # what the selected tests will ask for, in their order
            if isinstance(item, pytest.Function) and item.path == Path(__file__):
                wanted = item.callspec.params
                result.start(str(wanted.get("name") or str(wanted["arguments"]).split()[0]))
        yield result
        result.stop()


@pytest.mark.parametrize("arguments", RUNS)
def test_kernels_on_threads(programs: Programs, arguments: str) -> None:
    name, _, options = arguments.partition(" ")
    done = run(programs.get(name), f"mixed {options} seconds=1.5")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout, end="")


@pytest.mark.parametrize("name", collective_mutants.MUTANTS)
def test_mutant_is_noticed(programs: Programs, name: str) -> None:
    mutant = collective_mutants.MUTANTS[name]
    done = run(programs.get(name), mutant.run)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, 2), f"nothing noticed {name}: {said}"
    assert re.search(mutant.says, said), f"{name} was noticed, but not by '{mutant.says}':\n{said[:2000]}"

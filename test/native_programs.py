"""Builds the native test programs, from csrc/ as it is and from changed copies, and runs them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mutants

NATIVE = Path(__file__).resolve().parent / "native"


@dataclass(frozen=True)
class Recipe:
    """What a program differs in: `edits` of csrc/, and values of -fsanitize."""

    edits: tuple[mutants.Edit, ...] = ()
    sanitizers: tuple[str, ...] = ()

    @classmethod
    def of(cls, mutant: mutants.Mutant) -> Recipe:
        return cls(mutant.edits, (mutant.sanitizer,) if mutant.sanitizer else ())


class Programs:
    """Programs that `script` builds, by name; two are built at a time, in the background."""

    def __init__(self, folder: Path, script: Path, recipe: Callable[[str], Recipe]) -> None:
        self._folder = folder
        self._script = script
        self._recipe = recipe
        self._workers = ThreadPoolExecutor(2)
        self._builds: dict[str, Future[Path]] = {}

    def get(self, name: str) -> Path:
        return self.start(name).result()

    def start(self, name: str) -> Future[Path]:
        if name not in self._builds:
            self._builds[name] = self._workers.submit(self._build, name)
        return self._builds[name]

    def _build(self, name: str) -> Path:
        recipe = self._recipe(name)
        csrc = mutants.copy(recipe.edits, self._folder / name / "csrc")
        program = self._folder / name / "program"
        flags = [f"-fsanitize={sanitizer}" for sanitizer in recipe.sanitizers]
        if flags:
            flags.append("-fno-sanitize-recover=all")
        command = [str(self._script), str(csrc), str(program), *flags]
        built = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert built.returncode == 0, f"{name}:\n{built.stderr}"
        return program

    def stop(self) -> None:
        self._workers.shutdown(cancel_futures=True)


@functools.cache
def _fixed_addresses() -> list[str]:
    """ThreadSanitizer cannot cope with every randomisation of addresses."""
    command = ["setarch", "-R"]
    if shutil.which("setarch") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        return command
    return []


def run(program: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_fixed_addresses(), program, *arguments.split(), "watchdog=100"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"TSAN_OPTIONS": "halt_on_error=1"},
    )

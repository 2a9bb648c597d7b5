"""What the documentation says is so: the examples of docs/testing.md run, and the tests that docs/proof.md names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
_PAGE = _HERE.parent / "docs/testing.md"
EXAMPLES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_every_block_is_an_example() -> None:
    assert len(EXAMPLES) == _PAGE.read_text().count("```python\n") >= 5


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(EXAMPLES[name])
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    is_test = name.startswith("test_")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", name] if is_test else [name]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if is_test:
        tests = EXAMPLES[name].count("def test_")
        assert int(re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)[1]) >= tests  # type: ignore[index]


def test_the_table_of_cases_is_complete() -> None:
    text = (_HERE.parent / "docs/proof.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", text, re.MULTILINE)
    named = {
        (int(case), file, test)
        for case, tests in rows
        for file, test in re.findall(r"`((?:cuda/)?test_\w+\.py)::(\w+)`", tests)
    }
    for _, file, test in named:
        assert f"def {test}(" in (_HERE / file).read_text(), f"there is no {test} in {file}"
    written = {
        (int(case), str(path.relative_to(_HERE)), test)
        for path in sorted(_HERE.rglob("test_*.py"))
        for test, numbers in re.findall(r"^def (test_case_((?:\d\d_)+)\w+)", path.read_text(), re.MULTILINE)
        for case in re.findall(r"\d\d", numbers)
    }
    listed = {int(case) for case, _ in rows}
    assert {entry for entry in written - named if entry[0] in listed} == set()

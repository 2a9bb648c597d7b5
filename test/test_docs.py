"""The examples of docs/testing.md, each run as the file that its first line names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PAGE = Path(__file__).resolve().parent.parent / "docs/testing.md"
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

"""Tables of all_reduce choices: used where they were measured, and refused when no launch can be made of them."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_gpusync
from torch_gpusync import cuda_memory, tuning
from torch_gpusync.rendezvous import Deadline, Rendezvous
from torch_gpusync.testing import RankError, run_threads

GPU = "NVIDIA H200"
ROW = {"max_bytes": 4096, "algo": "push_one_shot", "blocks": 8, "threads": 128}
LAST = {"max_bytes": (1 << 63) - 1, "algo": "pull_two_shot", "blocks": 128, "threads": 512}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes its argument the user's own table."""

    def write(table: Any) -> None:
        path = tmp_path / "table.json"
        path.write_text(table if isinstance(table, str) else json.dumps(table))
        monkeypatch.setenv("GPUSYNC_TUNING", str(path))

    return write


def _table(rows: list[Any], gpu: str = "a GPU", ranks_on_gpu: int = 1) -> dict[str, Any]:
    return {
        "measured_on": {"gpu": gpu, "ranks_on_gpu": ranks_on_gpu, "description": "here"},
        "rows": {"3": rows},
    }


@pytest.mark.parametrize(
    "path", sorted((Path(tuning.__file__).parent / "tables").glob("*.json")), ids=lambda p: p.stem
)
def test_tables_of_the_library(path: Path) -> None:
    table = json.loads(path.read_text())
    assert table["measured_on"]["description"]
    for world_size, rows in table["rows"].items():
        found = tuning.find(
            table["measured_on"]["gpu"], table["measured_on"]["ranks_on_gpu"], int(world_size)
        )
        assert found == tuning.flatten(rows)
        assert rows[-1]["max_bytes"] == (1 << 63) - 1  # every size has a row


def test_a_table_is_used_where_it_was_measured(own: Any) -> None:
    own(_table([ROW, LAST]))
    assert tuning.find("a GPU", 1, 3) == [4096, 3, 8, 128, 0, (1 << 63) - 1, 2, 128, 512, 0]
    assert tuning.find("another GPU", 1, 3) == []
    assert tuning.find("a GPU", 2, 3) == []  # ranks that share it
    assert tuning.find("a GPU", 1, 4) == []


def test_ones_own_table_comes_first(own: Any) -> None:
    shipped = tuning.find(GPU, 8, 4)
    assert shipped
    table = _table([LAST], GPU, 2)
    table["rows"] = {"4": [LAST]}
    own(table)
    assert tuning.find(GPU, 8, 4) == tuning.flatten([LAST]) != shipped
    assert tuning.find(GPU, 8, 2)  # not in it: the library's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "1 to 512 threads"),
        ({"threads": 1024}, "1 to 512 threads"),
        ({"blocks": 0}, "1 block at least"),
        ({"max_bytes": 0}, "max_bytes must rise"),
        ({"max_bytes": 1 << 63}, "max_bytes must rise"),
        ({"blocks": 1.5}, "are integers"),
        ({"threads": None}, "are integers"),
        ({"dtypes": ["int64", "int8"]}, "int8 is none of the dtypes"),
        ({"algo": "ring"}, "algo is one of pull_one_shot, "),
    ],
)
def test_a_row_that_cannot_be_launched_is_refused(own: Any, change: dict[str, Any], message: str) -> None:
    own(_table([{**ROW, **change}, LAST]))
    with pytest.raises(ValueError, match=message):
        tuning.find("a GPU", 1, 3)


@pytest.mark.parametrize("table", ["", "[]", "{}", '{"measured_on": {"gpu": "a GPU"}}', '{"measured_on": 3}'])
def test_a_file_that_is_no_table_is_refused_by_its_name(own: Any, table: str) -> None:
    own(table)
    with pytest.raises(ValueError, match=r"GPUSYNC_TUNING=.*table\.json is no table of choices"):
        tuning.find("a GPU", 1, 3)


def test_sizes_that_do_not_rise_are_refused(own: Any) -> None:
    own(_table([LAST, ROW]))
    with pytest.raises(ValueError, match="max_bytes must rise"):
        tuning.find("a GPU", 1, 3)


def test_rows_for_some_dtypes_have_sizes_of_their_own(own: Any) -> None:
    some = [{**row, "dtypes": ["float32", "int64"]} for row in (ROW, LAST)]
    own(_table([ROW, LAST, *some]))
    found = tuning.find("a GPU", 1, 3)
    assert found[4::5] == [0, 0, 1 << 1 | 1 << 6, 1 << 1 | 1 << 6] and found[0::5][:2] == found[0::5][2:]


def test_some_row_is_for_any_dtype(own: Any) -> None:
    own(_table([{**LAST, "dtypes": ["float32"]}]))
    with pytest.raises(ValueError, match="rows without dtypes are missing"):
        tuning.find("a GPU", 1, 3)


def test_numbers_of_dtypes_are_the_librarys() -> None:
    header = (Path(torch_gpusync.include_path()) / "gpusync" / "fingerprint.h").read_text()
    for enum, numbers in (("DType", tuning.DTYPE_NUMBERS), ("Algo", tuning.ALGO_NUMBERS)):
        found = re.search(rf"enum class {enum} : uint8_t \{{ (.*?) \}}", header, re.DOTALL)
        assert found is not None
        names = [name.strip()[1:].lower() for name in found[1].split(",")]
        assert {name: names.index(name.replace("_", "")) for name in numbers} == numbers


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUSYNC_TUNING", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="FileNotFoundError"):
        tuning.find("a GPU", 1, 3)


# ---- one choice for all ranks


class _Memory:
    """Instead of a GPU's, which nothing here looks at."""

    def allocate(self, *_: Any) -> tuple[torch.Tensor, list[int], Any]:
        return torch.zeros(1), [], None


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives three ranks their device parts, with a GPU and its ops played, and returns what each was tuned
    to. Its argument tells what a rank's table has."""
    me, tuned = threading.local(), dict[int, list[int]]()
    played = {
        "_cuda_pad_bytes": lambda *_: 64,
        "_cuda_open": lambda *_: None,
        "_cuda_probe": lambda name, phase: [],
        "_cuda_tune": lambda name, rows: tuned.update({me.rank: rows}),
    }
    monkeypatch.setattr(cuda_memory, "ops", SimpleNamespace(**played))
    gpu = SimpleNamespace(uuid="u", multi_processor_count=132, major=9, name=GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    def attach(choices: Any) -> dict[int, list[int]]:
        monkeypatch.setattr(tuning, "find", lambda *_: choices(me.rank))
        shared = dist.HashStore()

        def rank(r: int) -> None:
            me.rank = r
            meeting, deadline = Rendezvous(shared, r, 3, range(3), "here"), Deadline(20)
            meeting.agree({"call": "SyncGroup"}, "SyncGroup", "g", deadline)
            arguments = (meeting, _Memory(), f"g/{r}", "g", torch.zeros(1), 1, 64, deadline)
            cuda_memory.attach(*arguments)

        run_threads(rank, 3, timeout=30)
        return tuned

    return attach


def test_all_ranks_take_rank_0s_choices(attached: Any) -> None:
    """Blocks meet by their index: a rank with wider ones would read what a peer's other block has not staged yet."""
    assert attached(lambda r: [4096, 1, 16, 128 + r]) == {r: [4096, 1, 16, 128] for r in range(3)}


def test_a_table_that_is_refused_on_one_rank_is_told_to_all(attached: Any) -> None:
    def choices(r: int) -> list[int]:
        if r == 2:
            raise ValueError("no table of choices")
        return []

    with pytest.raises(RankError) as caught:
        attached(choices)
    told = "SyncError: gpusync: SyncGroup of group 'g' failed on rank 2: no table of choices"
    assert all(told in caught.value.failed[r] for r in range(3))

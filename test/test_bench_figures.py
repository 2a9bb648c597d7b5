"""From calls to figures: the order of samples, the checks of data, the arithmetic, the table, the picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_gpusync.bench import plan
from torch_gpusync.bench.data import AllReduceData, check_barrier
from torch_gpusync.bench.results import Measurement, combine, percentile, read_json, table, write_json
from torch_gpusync.bench.timing import Sampling, Series, Subject, measure

# ---- timing


class _Clock:
    """A timer for which every call of `name` costs what the test says, and a record of what was timed."""

    def __init__(self, cost: dict[str, float]) -> None:
        self.cost = cost
        self.timed: list[tuple[str, int]] = []
        self._last = ""

    def subject(self, name: str, **more: Any) -> Subject:
        def call() -> None:
            self._last = name

        return Subject(name, "impl", call, **more)

    def timer(self, call: Callable[[], object], calls: int) -> float:
        call()
        self.timed.append((self._last, calls))
        return calls * self.cost[self._last]


def _measure(clock: _Clock, subjects: list[Subject], sampling: Sampling) -> list[Series]:
    return measure(
        subjects,
        sampling,
        timer=clock.timer,
        meet=lambda: None,
        agree=lambda value: value,
        progress=lambda text: None,
    )


def test_samples_last_as_long_as_asked_and_count_per_op() -> None:
    clock = _Clock({"slow": 0.5, "fast": 1e-6})
    slow, fast = clock.subject("slow"), clock.subject("fast", ops_per_call=20)
    series = _measure(clock, [slow, fast], Sampling(rounds=4, sample_s=0.1))
    assert [len(s.samples_us) for s in series] == [4, 4]
    assert series[0].ops_per_sample == 3, "never fewer than three calls"
    assert series[0].samples_us == pytest.approx([5e5] * 4)
    assert series[1].ops_per_sample == pytest.approx(20 * 100_000, rel=0.01)
    assert series[1].samples_us == pytest.approx([0.05] * 4)


def test_peers_are_measured_first_and_last() -> None:
    clock = _Clock({"ours": 0.01, "peer": 0.02})
    ours, peer = clock.subject("ours"), clock.subject("peer", is_peer=True)
    series = _measure(clock, [ours, peer], Sampling(rounds=2, sample_s=0.1))
    samples = [
        name for name, calls in clock.timed if calls in (series[0].ops_per_sample, series[1].ops_per_sample)
    ]
    assert samples[-5:] == ["peer", "ours", "peer", "ours", "peer"]
    assert [len(s.samples_us) for s in series] == [2, 3]


def test_data_is_fresh_for_every_sample_and_checked_afterwards() -> None:
    events: list[str] = []
    clock = _Clock({"op": 0.1})
    subject = clock.subject(
        "op", refresh=lambda: events.append("fresh"), check=lambda: events.append("check")
    )
    _measure(clock, [subject], Sampling(rounds=3, sample_s=0.1))
    assert events == ["fresh"] * 4 + ["check"]  # once more for the choice of the number of calls


def test_a_wrong_sum_is_noticed() -> None:
    data = AllReduceData(rank=1, world_size=3, nbytes=4000)
    first = data.input.clone()
    data.check_bits(data._expected)
    assert not torch.equal(data.input, first), "the check draws numbers of its own"
    with pytest.raises(AssertionError):
        data.check_bits(lambda: data._expected() + 1e-6)
    data.check_in_place(lambda: data.input.copy_(data._expected()))
    with pytest.raises(AssertionError):
        data.check_in_place(lambda: None)
    # The ranks draw different numbers, and each knows the others'.
    other = AllReduceData(rank=2, world_size=3, nbytes=4000)
    again = AllReduceData(rank=1, world_size=3, nbytes=4000)
    assert torch.equal(again.input, first)
    assert not torch.equal(other.input, first)
    assert torch.equal(other._expected(), again._expected())


class _Board:
    """A buffer of two ranks of which the other one is always right, or always late."""

    def __init__(self, late: bool) -> None:
        self.sync = SimpleNamespace(world_size=2)
        self._value, self._late = 0, late

    def put(self, x: torch.Tensor) -> None:
        self._value = int(x.item())

    def get(self, rank: int = 0) -> torch.Tensor:
        return torch.tensor([self._value - (1 if self._late and rank == 1 else 0)])


def test_a_barrier_that_lets_ranks_through_is_noticed() -> None:
    check_barrier(_Board(late=False), lambda: None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"the ranks' values were \[1, 0\] instead of 1"):
        check_barrier(_Board(late=True), lambda: None)  # type: ignore[arg-type]


# ---- figures


def _figure(
    op: str, impl: str, median: float, mode: str = "eager", ranks: int = 2, nbytes: int = 0
) -> Measurement:
    return Measurement(op, impl, "cpu", ranks, nbytes, mode, median, 2 * median, 100)


_KEYS = {"op", "impl", "device", "ranks", "bytes", "mode", "median_us", "p99_us", "iterations"}


def test_percentiles() -> None:
    assert percentile([5.0], 0.99) == 5.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 100.0], 0.99) == pytest.approx(99.0)


def test_the_slowest_rank_counts_in_every_sample() -> None:
    ranks = [
        Series("barrier", "gpusync", "eager", False, 1000, [1.0, 5.0, 1.0]),
        Series("barrier", "gpusync", "eager", False, 1000, [2.0, 1.0, 4.0]),
    ]
    m = combine(ranks, "cpu", 0, ranks=2)
    assert (m.median_us, m.iterations, m.ranks) == (4.0, 3000, 2)
    assert 4.9 < m.p99_us < 5.0


def test_ratios_are_to_the_same_conditions() -> None:
    text = table(
        [
            _figure("nothing", "gpusync", 0.5),
            _figure("barrier", "gloo", 100.0),
            _figure("barrier", "gloo", 999.0, ranks=4),
            _figure("barrier", "gpusync", 1.0),
            _figure("barrier", "gpusync", 0.25, mode="compile"),
            _figure("all_reduce", "gloo", 3.0, nbytes=4096),
            _figure("all_reduce", "gpusync", 6.0, nbytes=4096),
        ]
    )
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[-2:] for row in rows if row[0] == "barrier" and "gpusync" in row] == [
        ["1/100", "2.00"],
        ["1/400", "0.50"],
    ]
    assert rows[-1][-2:] == ["2.00", "12.00"]
    assert rows[0][-1] == "1.00", "the floor has no ratio: its last figure is the p99"


def test_json_round_trip(tmp_path: Path) -> None:
    figures = [_figure("barrier", "gloo", 100.0), _figure("barrier", "gpusync", 1.0)]
    write_json(figures, tmp_path / "figures.json")
    assert read_json(tmp_path / "figures.json") == figures
    assert {field.name for field in dataclasses.fields(Measurement)} == _KEYS


def test_sizes() -> None:
    assert [plan.parse_bytes(text) for text in ("4096", "4K", "4k", "16M", "1G")] == [
        4096,
        4096,
        4096,
        1 << 24,
        1 << 30,
    ]
    assert [plan.human(n) for n in (100, 4096, 6000, 1 << 20)] == ["100 B", "4 KiB", "6000 B", "1 MiB"]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional package")
    from torch_gpusync.bench.plot import plot

    path = tmp_path / "figures.png"
    plot([_figure("barrier", "gloo", 100.0), _figure("all_reduce", "gpusync", 2.0, nbytes=4096)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_lines_of_a_picture() -> None:
    from torch_gpusync.bench.plot import panels

    figures = [
        _figure("nothing", "gpusync", 1.0, ranks=2),
        _figure("barrier", "gpusync", 2.0, ranks=2),
        _figure("barrier", "peer", 2.5, ranks=2),
        _figure("all_reduce", "peer fast", 3.0, nbytes=8, ranks=2),
        _figure("all_reduce", "peer", 3.0, nbytes=8, ranks=2),
        _figure("all_reduce", "gpusync", 4.0, nbytes=8, ranks=2),
        _figure("all_reduce", "gpusync", 5.0, nbytes=8, ranks=4),
    ]
    assert panels(figures) == {
        "barrier": {"a call of nothing": [(2, 1.0)], "gpusync": [(2, 2.0)], "peer": [(2, 2.5)]},
        # The floor is that of as many ranks; the best variant under the peer's name is no line of its own.
        "all_reduce, 2 ranks": {
            "peer fast": [(8, 3.0)],
            "gpusync": [(8, 4.0)],
            "a call of nothing": [(8, 1.0)],
        },
        "all_reduce, 4 ranks": {"gpusync": [(8, 5.0)]},
    }

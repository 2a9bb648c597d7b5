"""From the ranks' samples to figures, the table and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from .timing import Series

NOTHING = "nothing"  # the op that does nothing: what a call costs
OURS = "gpusync"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is reported of one op, size and implementation.

    Attributes:
        op: ``barrier``, ``all_reduce``, ... or ``nothing``.
        impl: ``gpusync`` (through ``torch.ops``), ``SyncGroup`` (its method), ``gloo``, ``mpich``, ...
        device: ``cpu`` or ``cuda``.
        ranks: processes that took part.
        bytes: payload of each rank, 0 for none.
        mode: ``eager``, ``graph``, ``compile`` or ``kernel`` (timed by the device, inside one kernel).
        median_us, p99_us: microseconds per call over samples of many calls; the slowest rank's count.
        iterations: calls timed in all, per rank.
    """

    op: str
    impl: str
    device: str
    ranks: int
    bytes: int
    mode: str
    median_us: float
    p99_us: float
    iterations: int


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest samples."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def combine(by_rank: Sequence[Series], device: str, nbytes: int, ranks: int) -> Measurement:
    """One measurement from every rank's series of a subject (or one series that is the slowest rank's)."""
    first = by_rank[0]
    slowest = [max(samples) for samples in zip(*(series.samples_us for series in by_rank), strict=True)]
    return Measurement(
        first.op,
        first.impl,
        device,
        ranks,
        0 if first.op == NOTHING else nbytes,
        first.mode,
        round(statistics.median(slowest), 3),
        round(percentile(slowest, 0.99), 3),
        first.ops_per_sample * len(slowest),
    )


def with_best_of(measurements: Sequence[Measurement], peer: str) -> list[Measurement]:
    """Adds, under the name of ``peer``, the fastest of its variants (``peer variant``) for each case."""
    cases: dict[tuple[str, int, int, str], list[Measurement]] = {}
    for m in measurements:
        if m.impl.startswith(peer + " "):
            cases.setdefault((m.op, m.ranks, m.bytes, m.mode), []).append(m)
    best = [min(variants, key=lambda m: m.median_us) for variants in cases.values()]
    return [*measurements, *(dataclasses.replace(m, impl=peer) for m in best)]


def write_json(measurements: Sequence[Measurement], path: Path) -> None:
    """A list of objects with the attributes of Measurement."""
    path.write_text(json.dumps([dataclasses.asdict(m) for m in measurements], indent=1) + "\n")


def read_json(path: Path) -> list[Measurement]:
    """What write_json wrote."""
    return [Measurement(**entry) for entry in json.loads(path.read_text())]


def table(measurements: Sequence[Measurement]) -> str:
    """All figures as text; gpusync's rows have the ratio to each peer (``1/85``: 85 times as fast)."""
    ours = {m.impl for m in measurements if m.impl.split(" ")[0] in (OURS, "SyncGroup")}
    peers = list(dict.fromkeys(m.impl for m in measurements if m.impl not in ours and " " not in m.impl))
    has_floor = any(m.op == NOTHING for m in measurements)
    header = [
        "op",
        "ranks",
        "bytes",
        "mode",
        "impl",
        "median µs",
        "p99 µs",
        *(f"vs {peer}" for peer in peers),
    ]
    rows = [header + ([f"vs {NOTHING}"] if has_floor else [])]
    for m in measurements:
        row = [
            m.op,
            str(m.ranks),
            str(m.bytes or ""),
            m.mode,
            m.impl,
            f"{m.median_us:.2f}",
            f"{m.p99_us:.2f}",
        ]
        for peer in peers:
            row.append(_ratio(m, _find(measurements, m, m.op, peer)) if m.impl in ours else "")
        if has_floor:
            floor = _find(measurements, dataclasses.replace(m, bytes=0), NOTHING, OURS)
            row.append(_ratio(m, floor) if m.impl in ours and m.op != NOTHING else "")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text_columns = {0, 3, 4}
    lines = [
        "  ".join(
            cell.ljust(width) if i in text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _find(measurements: Sequence[Measurement], like: Measurement, op: str, impl: str) -> Measurement | None:
    """The figure of ``op`` by ``impl`` under the conditions of ``like``; else its eager one."""
    fitting = {
        m.mode: m
        for m in measurements
        if (m.op, m.impl, m.device, m.ranks, m.bytes) == (op, impl, like.device, like.ranks, like.bytes)
    }
    return fitting.get(like.mode, fitting.get("eager"))


def _ratio(mine: Measurement, other: Measurement | None) -> str:
    if other is None or other.median_us == 0:
        return ""
    ratio = mine.median_us / other.median_us
    if ratio >= 0.5:
        return f"{ratio:.2f}"
    return f"1/{1 / ratio:.1f}" if ratio > 0.1 else f"1/{1 / ratio:.0f}"

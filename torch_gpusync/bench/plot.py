"""The figures as a picture. Needs matplotlib: ``pip install torch_gpusync[bench]``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .plan import human
from .results import NOTHING, OURS, Measurement

_FLOOR = "a call of nothing"

Lines = dict[str, list[tuple[int, float]]]  # by label: bytes or ranks, and microseconds


def panels(measurements: Sequence[Measurement]) -> dict[str, Lines]:
    """What :func:`plot` shows, by the panels' titles."""
    floors = {(m.ranks, m.mode): m.median_us for m in measurements if m.op == NOTHING}
    found: dict[str, Lines] = {}
    for m in measurements:
        variants = [
            other for other in measurements if other.impl.startswith(f"{m.impl} ") and other.op == m.op
        ]
        if variants and m.impl != OURS:
            continue  # the best of its variants, which have lines of their own
        panel = f"{m.op}, {m.ranks} ranks" if m.bytes else "barrier" if m.op == NOTHING else m.op
        label = _FLOOR if m.op == NOTHING else m.impl if m.mode == "eager" else f"{m.impl}, {m.mode}"
        lines = found.setdefault(panel, {})
        lines.setdefault(label, []).append((m.bytes or m.ranks, m.median_us))
        floor = floors.get((m.ranks, m.mode))
        if m.bytes and m.impl == OURS and floor is not None:
            lines.setdefault(_FLOOR, []).append((m.bytes, floor))
    return found


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """One panel per op without a payload (against ranks), else per op and number of ranks (against bytes), with the floor
    where it was measured. Panels of one point per line are left out, where there are others: the table says as much.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    shown = panels(measurements)
    shown = {title: lines for title, lines in shown.items() if len(_xs(lines)) > 1} or shown
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.5 * columns, 4.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (title, lines) in zip(axes.flat, shown.items(), strict=False):
        for label, points in lines.items():
            xs, ys = zip(*sorted(points), strict=True)
            ours = label.split(",")[0] == OURS
            look = {"color": "black", "linewidth": 2, "zorder": 3} if ours else {}
            # Ours is dashed: it may lie on a variant's line.
            style = ":" if label == _FLOOR else "--" if ours else "-"
            axis.plot(xs, ys, style, marker="o", markersize=4, label=label, **look)
        ticks = _xs(lines)
        has_bytes = "ranks" in title
        axis.set(
            title=title, xscale="log", yscale="log", xlabel="" if has_bytes else "ranks", ylabel="µs per call"
        )
        axis.set_xticks(ticks, [human(x) if has_bytes else str(x) for x in ticks])
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(
            fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.1 if has_bytes else -0.15), ncols=2
        )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _xs(lines: Lines) -> list[int]:
    return sorted({x for points in lines.values() for x, _ in points})

"""The figures as a picture. Needs matplotlib: ``pip install torch_gpusync[bench]``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .plan import human
from .results import NOTHING, Measurement


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """One panel per op without a payload (against ranks), else per op and number of ranks (against bytes).

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for m in measurements:
        panel = f"{m.op}, {m.ranks} ranks" if m.bytes else "barrier" if m.op == NOTHING else m.op
        label = (
            "a call of nothing" if m.op == NOTHING else m.impl if m.mode == "eager" else f"{m.impl}, {m.mode}"
        )
        panels.setdefault(panel, {}).setdefault(label, []).append((m.bytes or m.ranks, m.median_us))
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for label, points in lines.items():
            xs, ys = zip(*sorted(points), strict=True)
            style = ":" if label == "a call of nothing" else "-"
            axis.plot(xs, ys, style, marker="o", markersize=4, label=label)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        has_bytes = "ranks" in title
        axis.set(
            title=title, xscale="log", yscale="log", xlabel="" if has_bytes else "ranks", ylabel="µs per call"
        )
        axis.set_xticks(ticks, [human(x) if has_bytes else str(x) for x in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

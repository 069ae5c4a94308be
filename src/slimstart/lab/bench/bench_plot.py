"""The figure of a benchmark: speed-up by remaining FLOPs, as an SVG file for light and dark pages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes

from slimstart.io import atomic
from slimstart.lab.bench.bench_records import STRUCTURES, Bench, Row
from slimstart.lab.reports.canvas import (
    COLORS,
    FONT,
    LEFT,
    Canvas,
    add_axes,
    alone,
    percent,
    plain,
    short,
    svg,
    write_above,
)
from slimstart.lab.reports.series import DASHES, MARKERS

HEIGHT = 330.0
PAPER = ((0.286, 1.55), (0.193, 2.09), (0.103, 3.20), (0.049, 4.50), (0.017, 7.41))
"""Remaining FLOPs and speed-up of VGG-19 on an RTX 2080 Ti, as the paper reports them."""

Point = tuple[float, float]


def write(bench: Bench, path: str | os.PathLike[str]) -> None:
    """Write the figure, atomically."""
    atomic.write(path, draw(bench).encode())


def draw(bench: Bench) -> str:
    """The figure, the same bytes for the same record."""
    first = bench.rows[0]
    title = f"Speed-up of a training step: {first.model}, batches of {first.batch_size}, {first.precision}"

    def paint(canvas: Canvas) -> None:
        axes = add_axes(canvas, 66, HEIGHT - 106)
        write_above(axes, "times faster than dense", short(bench.hardware, 44), color="muted", indent=LEFT)
        _scale(axes, [row.flops_ratio for row in bench.rows] + [ratio for ratio, _ in PAPER])
        for label, points, role, marker, dashes in _lines(bench.rows):
            axes.plot(
                *zip(*sorted(points), strict=True),
                color=COLORS[role],
                marker=None if marker is None else MARKERS[marker],
                markersize=5.5,
                linestyle=(0, DASHES[dashes] or None),
                label=label,
            )
        axes.set_xlabel("FLOPs, of dense")
        canvas.legend(
            loc="upper left", ncols=2, frameon=False, fontsize=FONT - 1.5, borderaxespad=0.2, columnspacing=1.2
        )

    return alone(svg(title, HEIGHT, paint))


def _lines(rows: Sequence[Row]) -> Iterator[tuple[str, list[Point], str, int | None, int]]:
    """Label, points, colour, marker and dashes of each line."""
    ratios = [row.flops_ratio for row in rows] + [ratio for ratio, _ in PAPER]
    yield "proportional to FLOPs", [(ratio, 1 / ratio) for ratio in (min(ratios), max(ratios))], "muted", None, 2
    yield (
        "narrow network: the limit",
        _joined((row.flops_ratio, row.dense_ms / row.narrow_ms) for row in rows),
        "dense",
        1,
        0,
    )
    intervals = sorted({row.resample_every for row in rows})
    for i, every in enumerate(intervals):
        for k, structure in enumerate(STRUCTURES):
            own = [row for row in rows if (row.resample_every, row.structure) == (every, structure)]
            if own:
                label = f"slimstart, {structure}" + f", a draw every {every} steps" * (len(intervals) > 1)
                points = [(row.flops_ratio, row.speedup) for row in own]
                yield label, points, f"series-{1 + 2 * (i % 3)}", (0, 2)[k], (1, 0)[k]
    yield "the paper, VGG-19, RTX 2080 Ti", list(PAPER), "series-2", 3, 1


def _joined(points: Iterable[Point]) -> list[Point]:
    """The mean of points with the same FLOPs: rows of one structure share their narrow network."""
    found: dict[float, list[float]] = {}
    for x, y in points:
        found.setdefault(x, []).append(y)
    return [(x, sum(ys) / len(ys)) for x, ys in found.items()]


def _scale(axes: Axes, ratios: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    subs = (1, 2, 5) if max(ratios) < 100 * min(ratios) else (1,)
    for axis, shown in ((axes.xaxis, percent), (axes.yaxis, plain)):
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(shown)

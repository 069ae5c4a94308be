"""Figures of points and curves: what a network reaches, what its training costs, and both epoch by epoch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from slimstart.records import Epoch, Record
from slimstart.reports.drawing import (
    COLORS,
    FONT,
    LEFT,
    Canvas,
    Figure,
    add_axes,
    percent,
    plain,
    short,
    svg,
    write_above,
)
from slimstart.reports.series import Series

# Longer curves are means over bins of epochs: more points than columns of pixels show nothing.
MAX_POINTS = 160
HEIGHT = 260.0
# Where a label may stand beside its point: offset and alignment, best first.
_BESIDE = (
    (9, 0, "left", "center"),
    (0, 8, "center", "bottom"),
    (0, -8, "center", "top"),
    (-9, 0, "right", "center"),
    (7, 6, "left", "bottom"),
    (7, -6, "left", "top"),
    (-7, 6, "right", "bottom"),
    (-7, -6, "right", "top"),
)
Point = tuple[float, float]


def accuracy_by_train_cost(series: Sequence[Series]) -> Figure:
    return _points(
        series,
        "Accuracy and training cost",
        "training FLOPs, of dense",
        lambda run: run.train_flops / run.dense_train_flops,
        "Test accuracy of the finished network against all FLOPs that its training executed, as a share of dense "
        "training on the same images. Up and to the left is better.",
    )


def accuracy_by_flops(series: Sequence[Series]) -> Figure:
    return _points(
        series,
        "Accuracy and FLOPs",
        "FLOPs of one forward, of dense",
        lambda run: run.flops_ratio,
        "Test accuracy of the finished network against the multiply-adds of its forward, as a share of dense. "
        "Up and to the left is better.",
    )


def train_cost_per_epoch(series: Sequence[Series]) -> Figure:
    return _curves(
        series,
        "Training cost per epoch",
        "training FLOPs, % of dense",
        lambda epoch: 100 * epoch.train_flops / epoch.dense_train_flops,
        "FLOPs that an epoch executed, all forwards and backwards, as a share of dense training on the same images: "
        "the inverse of the saving. A marker stands where a search ends.",
        from_zero=True,
    )


def accuracy_per_epoch(series: Sequence[Series]) -> Figure:
    return _curves(
        series,
        "Accuracy per epoch",
        "accuracy, %",
        lambda epoch: epoch.test_accuracy,
        "Test accuracy after each epoch that was evaluated. A marker stands where a search ends.",
    )


def _points(series: Sequence[Series], title: str, xlabel: str, cost: Callable[[Record], float], caption: str) -> Figure:
    leaders: dict[str, Series] = {}
    for one in series:
        leaders.setdefault(one.row.first.method, one)

    def paint(canvas: Canvas) -> None:
        axes = _axes(canvas, "accuracy, %", xlabel)
        points = [(one.row.mean(cost) or 0.0, one.row.mean(_accuracy) or 0.0) for one in series]
        xs = [x for x, _ in points]
        if 0 < 3 * min(xs) < max(xs):
            axes.set_xscale("log")
            subs = (1, 2, 5) if max(xs) < 30 * min(xs) else (1, 3)
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=9))
            axes.xaxis.set_minor_locator(ticker.NullLocator())
        else:
            axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.xaxis.set_major_formatter(percent)
        axes.margins(x=0.14, y=0.14)
        lines: defaultdict[str, list[Point]] = defaultdict(list)
        for one, (x, y) in zip(series, points, strict=True):
            color = COLORS[one.role]
            axes.errorbar(x, y, one.row.spread(_accuracy), one.row.spread(cost), color=color, linewidth=1.2)
            axes.plot(x, y, color=color, marker=one.marker, markersize=7, linestyle="none")
            lines[one.row.first.method].append((x, y))
        for method, one in leaders.items():
            line = zip(*sorted(lines[method]), strict=True)
            axes.plot(*line, color=COLORS[one.role], linewidth=1, alpha=0.45)
        _limit_accuracy(axes)
        texts = [short(one.row.first.budget or one.row.label, 18) for one in series]
        _label(canvas, axes, list(zip(texts, points, strict=True)), list(lines.values()))

    seeds = " Points are means over the seeds, bars one sample standard deviation." if _several(series) else ""
    keys = tuple((one, method) for method, one in leaders.items())
    return Figure(title, caption + seeds, svg(f"{title}: {series[0].row.network}", HEIGHT, paint), keys)


def _label(canvas: Canvas, axes: Axes, labels: Sequence[tuple[str, Point]], lines: Sequence[Sequence[Point]]) -> None:
    """Write each label beside its point, where it covers no point, line or label; without such a place, not at all."""
    canvas.draw_without_rendering()  # only now is it known where the points are
    taken = [_box(axes, point, 6) for _, point in labels]
    for line in lines:
        spots = axes.transData.transform(sorted(line))
        for (x0, y0), (x1, y1) in itertools.pairwise(spots):
            steps = math.ceil(max(abs(x1 - x0), abs(y1 - y0)) / 3) + 1
            taken += [
                Bbox.from_bounds(x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps, 1, 1) for k in range(steps)
            ]
    inside = axes.get_window_extent()
    for text, point in labels:
        for dx, dy, ha, va in _BESIDE:
            note = axes.annotate(text, point, (dx, dy), textcoords="offset points", ha=ha, va=va, fontsize=FONT - 1.5)
            box = note.get_window_extent()
            corners = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            if corners and not box.count_overlaps(taken):
                taken.append(box)
                break
            note.remove()


def _box(axes: Axes, point: Point, radius: float) -> Bbox:
    x, y = axes.transData.transform(point)
    return Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


def _curves(
    series: Sequence[Series],
    title: str,
    ylabel: str,
    value: Callable[[Epoch], float | None],
    caption: str,
    from_zero: bool = False,
) -> Figure:
    drawn = [(one, curve) for one in series if (curve := joined(one.row.runs, value))]
    if not drawn:
        return Figure(title, "no epoch of these runs has one")

    def paint(canvas: Canvas) -> None:
        axes = _axes(canvas, ylabel, "epoch")
        for one, curve in drawn:
            x, mean, low, high = zip(*curve, strict=True)
            color = COLORS[one.role]
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
            axes.plot(x, mean, color=color, linestyle=one.linestyle)
            searched = max((e.epoch for e in one.row.first.history if e.phase == "search"), default=0)
            if 0 < searched < x[-1] or len(x) == 1:
                at = min(range(len(x)), key=lambda i: abs(x[i] - searched))
                axes.plot(x[at], mean[at], color=color, marker=one.marker, markersize=6)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.margins(x=0.02, y=0.06)
        axes.set_ylim(0 if from_zero else None, None)

    several = " Bands span the seeds." if _several(series) else ""
    long = max(curve[-1][0] for _, curve in drawn) > MAX_POINTS
    binned = " Neighbouring epochs are joined to one point; bands span them." if long else several
    keys = tuple((one, one.row.label) for one, _ in drawn)
    return Figure(title, caption + binned, svg(f"{title}: {series[0].row.network}", HEIGHT, paint), keys)


def joined(runs: Sequence[Record], value: Callable[[Epoch], float | None]) -> list[tuple[float, float, float, float]]:
    """Epoch, mean, least and greatest value over the runs, in at most `MAX_POINTS` bins of equally many epochs."""
    found = [(e.epoch, v) for run in runs for e in run.history if (v := value(e)) is not None]
    size = math.ceil(max((epoch for epoch, _ in found), default=1) / MAX_POINTS)
    bins: defaultdict[int, list[Point]] = defaultdict(list)
    for epoch, v in found:
        bins[(epoch - 1) // size].append((epoch, v))
    columns = [tuple(zip(*bins[i], strict=True)) for i in sorted(bins)]
    return [(sum(e) / len(e), sum(v) / len(v), min(v), max(v)) for e, v in columns]


def _axes(canvas: Canvas, ylabel: str, xlabel: str) -> Axes:
    axes = add_axes(canvas, 26, HEIGHT - 66)
    write_above(axes, ylabel, color="muted", indent=LEFT)
    axes.set_xlabel(xlabel)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.yaxis.set_major_formatter(plain)
    return axes


def _limit_accuracy(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 103))


def _accuracy(run: Record) -> float:
    return run.accuracy


def _several(series: Sequence[Series]) -> bool:
    return any(len(one.row.runs) > 1 for one in series)

"""Figures on axes: accuracy and cost with a point for each row, and both by epoch, with a curve for each row."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from slimstart.lab.records import Epoch, Record
from slimstart.lab.reports.canvas import (
    COLORS,
    FONT,
    LEFT,
    Canvas,
    Figure,
    add_axes,
    log_scale,
    percent,
    plain,
    short,
    svg,
    write_above,
)
from slimstart.lab.reports.rows import Value
from slimstart.lab.reports.series import MAX_CURVES, Series

HEIGHT = 260.0
# Places of a label next to its point, as offset and alignment, best first.
_PLACES = (
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
# Longer curves are means over bins of epochs: more points than pixels cannot be seen.
MAX_POINTS = 160
Curve = list[tuple[float, float, float, float]]


# --- a point for each row --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """The value that an axis shows, and the format of its ticks."""

    label: str
    value: Value
    ticks: ticker.FuncFormatter


FLOPS = Axis("FLOPs of one forward, of dense", lambda run: run.flops_ratio, percent)
ACCURACY = Axis("accuracy, %", lambda run: run.accuracy, plain)


def accuracy_by_train_cost(series: Sequence[Series]) -> Figure | None:
    return _points(
        series,
        "Accuracy and training cost",
        Axis("training FLOPs, of dense", lambda run: run.train_flops / run.dense_train_flops, percent),
        ACCURACY,
        "Test accuracy of the finished network against all FLOPs that its training executed, as a share of dense "
        "training on the same images. Up and to the left is better.",
    )


def accuracy_by_flops(series: Sequence[Series]) -> Figure | None:
    return _points(
        series,
        "Accuracy and FLOPs",
        FLOPS,
        ACCURACY,
        "Test accuracy of the finished network against the multiply-adds of its forward, as a share of dense. "
        "Up and to the left is better.",
    )


def train_cost_by_flops(series: Sequence[Series]) -> Figure | None:
    return _points(
        series,
        "Saving in training cost and FLOPs",
        FLOPS,
        Axis("times fewer training FLOPs than dense", lambda run: run.executed_saving, plain),
        "FLOPs of dense training on the same images, divided by all that the training executed, against the "
        "multiply-adds of a forward of the finished network. Higher is better.",
    )


def _points(series: Sequence[Series], title: str, across: Axis, up: Axis, caption: str) -> Figure | None:
    """One point for each row, and a line through those of one method: its budgets; nothing for a single row."""
    if len(series) < 2:
        return None
    points = [(one.row.mean(across.value) or 0.0, one.row.mean(up.value) or 0.0) for one in series]
    lines: defaultdict[str, list[tuple[Series, Point]]] = defaultdict(list)
    for one, point in zip(series, points, strict=True):
        lines[one.row.method].append((one, point))

    def paint(canvas: Canvas) -> None:
        axes = add_axes(canvas, 26, HEIGHT - 66)
        write_above(axes, up.label, color="muted", indent=LEFT)
        axes.set_xlabel(across.label)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
        log_scale(axes, "x", [x for x, _ in points])
        if up is not ACCURACY:
            log_scale(axes, "y", [y for _, y in points])
        axes.xaxis.set_major_formatter(across.ticks)
        axes.yaxis.set_major_formatter(up.ticks)
        axes.margins(x=0.14, y=0.14)
        for one, (x, y) in zip(series, points, strict=True):
            color, row = COLORS[one.role], one.row
            axes.errorbar(x, y, row.spread(up.value), row.spread(across.value), color=color, linewidth=1.2)
            filled = "none" if row.missed else color
            outline = (*one.marker, one.marker[0])  # a hollow marker is drawn as a line, which must be closed
            axes.plot(x, y, color=color, marker=outline, markersize=7, linestyle="none", markerfacecolor=filled)
        strokes = [sorted(point for _, point in line) for line in lines.values()]
        for ((leader, _), *_), stroke in zip(lines.values(), strokes, strict=True):
            axes.plot(*zip(*stroke, strict=True), color=COLORS[leader.role], linewidth=1, alpha=0.45)
        if up is ACCURACY:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 0), min(high, 103))
        texts = [short(one.row.first.budget or one.row.label, 18) for one in series]
        _label(canvas, axes, list(zip(texts, points, strict=True)), strokes)

    if any(len(one.row.runs) > 1 for one in series):
        caption += " Points are means over the seeds, bars one sample standard deviation."
    if any(one.row.missed for one in series):
        caption += " Hollow points exceed their budget."
    keys = tuple((line[0][0], method) for method, line in lines.items())
    return Figure(title, caption, svg(f"{title}: {series[0].row.network}", HEIGHT, paint), keys)


def _label(canvas: Canvas, axes: Axes, labels: Sequence[tuple[str, Point]], lines: Sequence[Sequence[Point]]) -> None:
    """Write each label next to its point, where it covers nothing; without such a place, leave it out."""
    canvas.draw_without_rendering()  # this computes the positions of the points
    taken = [_box(axes, point, 6) for _, point in labels]
    for line in lines:
        spots = axes.transData.transform(line)
        for (x0, y0), (x1, y1) in itertools.pairwise(spots):
            steps = math.ceil(max(abs(x1 - x0), abs(y1 - y0)) / 3) + 1
            taken += [
                Bbox.from_bounds(x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps, 1, 1) for k in range(steps)
            ]
    inside = axes.get_window_extent()
    for text, point in labels:
        for dx, dy, ha, va in _PLACES:
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


# --- a curve for each row --------------------------------------------------------------------------------------------


def train_cost_per_epoch(series: Sequence[Series]) -> Figure | None:
    return _curves(
        series,
        "Training cost per epoch",
        "training FLOPs, % of dense",
        lambda epoch: 100 * epoch.train_flops / epoch.dense_train_flops,
        "FLOPs that an epoch executed, all forwards and backwards, as a share of dense training on the same images: "
        "the inverse of the saving. A marker shows where a search ends.",
        is_share=True,
    )


def accuracy_per_epoch(series: Sequence[Series]) -> Figure | None:
    return _curves(
        series,
        "Accuracy per epoch",
        "accuracy, %",
        lambda epoch: epoch.test_accuracy,
        "Test accuracy after each epoch that was evaluated. A marker shows where a search ends.",
    )


def _curves(
    series: Sequence[Series],
    title: str,
    ylabel: str,
    value: Callable[[Epoch], float | None],
    caption: str,
    is_share: bool = False,
) -> Figure | None:
    drawn = [(one, curve) for one in series if (curve := joined(one.row.runs, value))]
    if all(len(curve) < 2 for _, curve in drawn):  # dots show nothing that the table does not
        return None

    panels = _panels(drawn)

    def paint(canvas: Canvas) -> None:
        for i, (budget, shown) in enumerate(panels):
            axes = add_axes(canvas, 26 + i * (HEIGHT - 20), HEIGHT - 66)
            write_above(axes, ylabel, short(budget), color="muted", indent=LEFT)
            for one, curve in shown:
                _curve(axes, one, curve)
            axes.set_xlabel("epoch" if i == len(panels) - 1 else "")
            axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, min_n_ticks=1))
            axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
            axes.margins(x=0.02, y=0.06)
            means = [mean for _, curve in shown for _, mean, _, _ in curve]
            if is_share and not log_scale(axes, "y", means):
                axes.set_ylim(0, 1.08 * max(means) or 1)
            axes.yaxis.set_major_formatter(plain)

    several = " Bands span the seeds." if any(len(one.row.runs) > 1 for one in series) else ""
    long = max(curve[-1][0] for _, curve in drawn) > MAX_POINTS
    binned = " Neighbouring epochs are joined to one point; bands span them." if long else several
    keys: dict[str, Series] = {}
    for one, _ in drawn:
        keys.setdefault(one.row.label if len(panels) == 1 else one.row.method, one)
    drawing = svg(f"{title}: {series[0].row.network}", HEIGHT + (len(panels) - 1) * (HEIGHT - 20), paint)
    named = tuple((one, name) for name, one in keys.items()) if len(keys) > 1 else ()
    return Figure(title, caption + binned, drawing, named)


def _panels(drawn: Sequence[tuple[Series, Curve]]) -> list[tuple[str, Sequence[tuple[Series, Curve]]]]:
    """Curves that share axes: all of them, or, if they are many, those of one budget and those without a budget."""
    budgets = dict.fromkeys(budget for one, _ in drawn if (budget := one.row.first.budget) is not None)
    if len(drawn) <= MAX_CURVES or not budgets:
        return [("", drawn)]
    return [(budget, [pair for pair in drawn if pair[0].row.first.budget in (None, budget)]) for budget in budgets]


def _curve(axes: Axes, one: Series, curve: Curve) -> None:
    x, mean, low, high = zip(*curve, strict=True)
    color = COLORS[one.role]
    axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
    axes.plot(x, mean, color=color, linestyle=one.linestyle)
    searched = max((e.epoch for e in one.row.first.history if e.phase == "search"), default=0)
    if 0 < searched < x[-1] or len(x) == 1:
        at = min(range(len(x)), key=lambda i: abs(x[i] - searched))
        axes.plot(x[at], mean[at], color=color, marker=one.marker, markersize=6)


def joined(runs: Sequence[Record], value: Callable[[Epoch], float | None]) -> Curve:
    """Epoch, mean, minimum and maximum over the runs, in at most `MAX_POINTS` bins of equally many epochs."""
    found = [(e.epoch, v) for run in runs for e in run.history if (v := value(e)) is not None]
    size = math.ceil(max((epoch for epoch, _ in found), default=1) / MAX_POINTS)
    bins: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for epoch, v in found:
        bins[(epoch - 1) // size].append((epoch, v))
    columns = [tuple(zip(*bins[i], strict=True)) for i in sorted(bins)]
    return [(sum(e) / len(e), sum(v) / len(v), min(v), max(v)) for e, v in columns]

"""Figures of curves: training cost and accuracy by epoch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes

from slimstart.lab.records import Epoch, Record
from slimstart.lab.reports.canvas import (
    COLORS,
    LEFT,
    Canvas,
    Figure,
    add_axes,
    log_scale,
    plain,
    short,
    svg,
    write_above,
)
from slimstart.lab.reports.series import MAX_CURVES, Series

# Longer curves are means over bins of epochs: more points than pixels cannot be seen.
MAX_POINTS = 160
HEIGHT = 260.0
Curve = list[tuple[float, float, float, float]]


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

"""Figures with one panel or bar for each row: widths, FLOPs, keep-probabilities, times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from slimstart.lab.records import NUM_BINS, Record
from slimstart.lab.reports.canvas import (
    COLORS,
    FONT,
    LEFT,
    RIGHT,
    WIDTH,
    Canvas,
    Figure,
    add_axes,
    plain,
    short,
    svg,
    write_above,
)
from slimstart.lab.reports.series import MAX_CURVES, Series
from slimstart.lab.reports.tables import duration, number, time_unit

Bar = tuple[str, float, float]
"""A layer, its value in the dense network, and in the finished one."""

MAX_COLUMNS = 160  # of a heat map
HEAT = to_rgb("#4098e0")  # its opacity shows the density, so it suits light and dark


def widths(series: Sequence[Series]) -> Figure | None:
    drawn = [one for one in series if any(layer.width < layer.dense for layer in one.row.first.layers)]
    if not drawn:
        return None

    def note(run: Record) -> str:
        kept = sum(layer.width for layer in run.layers) / sum(layer.dense for layer in run.layers)
        return f"{number(100 * kept)} % of all filters"

    return _by_layer(
        "Width of every layer",
        "Filters of every layer, from the first to the last: dense in grey, the finished network of the first seed in "
        "colour; on a scale of square roots. Where there are many layers, only some are named.",
        drawn,
        lambda run: [(layer.name, layer.dense, layer.width) for layer in run.layers],
        note,
    )


def flops(series: Sequence[Series]) -> Figure | None:
    def bars(run: Record) -> list[Bar]:
        return [
            (layer.name, layer.dense_flops / 1e6, layer.flops / 1e6)
            for layer in run.layers
            if layer.dense_flops is not None and layer.flops is not None
        ]

    drawn = [one for one in series if one.row.first.method != "dense" and bars(one.row.first)]
    if not drawn:
        return None
    return _by_layer(
        "FLOPs by layer",
        "Million multiply-adds of every layer for one image, from the first to the last: dense in grey, the finished "
        "network of the first seed in colour; on a scale of square roots.",
        drawn,
        bars,
        lambda run: f"{number(100 * run.flops_ratio)} % of dense",
    )


def _by_layer(
    title: str,
    caption: str,
    drawn: Sequence[Series],
    bars: Callable[[Record], Sequence[Bar]],
    note: Callable[[Record], str],
) -> Figure:
    """Bars of the finished network in front of those of the dense one, layer by layer."""
    few = len(drawn) <= MAX_CURVES

    def paint(axes: Axes, one: Series) -> None:
        names, dense, own = zip(*bars(one.row.first), strict=True)
        write_above(axes, short(one.row.label), note(one.row.first))
        edges = np.arange(len(names) + 1) + 0.5
        axes.stairs(dense, edges, fill=True, color=COLORS["line"])
        axes.stairs(own, edges, fill=True, color=COLORS[one.role], alpha=0.85)
        axes.set_xlim(0.5, len(names) + 0.5)
        # Early layers of large networks are narrow: on a plain scale they would not be seen.
        axes.set_yscale("function", functions=(np.sqrt, np.square))
        axes.set_ylim(0, max(dense))
        axes.yaxis.set_major_locator(ticker.MaxNLocator(3 if few else 1, integer=max(dense) > 3))
        axes.yaxis.set_major_formatter(plain)
        # A turned name needs the height of a line; only the last panel names the layers.
        step = math.ceil(len(names) * (FONT + 1) / (WIDTH - LEFT - RIGHT))
        named = range(0, len(names), step) if one is drawn[-1] else ()
        axes.set_xticks([i + 1 for i in named], [short(names[i], 13) for i in named], rotation=90, fontsize=FONT - 1.5)

    drawing = _panels(f"{title}: {drawn[0].row.network}", drawn, paint, height=74 if few else 30, gap=34, foot=58)
    return Figure(title, caption, drawing)


def keep_probs(series: Sequence[Series]) -> Figure | None:
    title = "Keep-probabilities over time"
    # Policies without probabilities have s = 0 or 1 throughout: nothing is between the first bin and the last.
    drawn = [one for one in series if any(any((e.keep_probs or ())[1:-1]) for e in one.row.first.history)]
    if not drawn:
        return None

    def paint(axes: Axes, one: Series) -> None:
        epochs = [epoch for epoch in one.row.first.history if epoch.keep_probs]
        certain = epochs[-1].certain
        note = "" if certain is None else f"{number(100 * certain)} % certain at the end"
        write_above(axes, short(one.row.label), note)
        opacity = densities(one.row.first)
        picture = np.concatenate([np.broadcast_to(HEAT, (*opacity.shape, 3)), opacity[..., None]], axis=2)
        extent = (epochs[0].epoch - 0.5, epochs[-1].epoch + 0.5, 0, 1)
        axes.imshow(picture, origin="lower", aspect="auto", interpolation="none", extent=extent)
        axes.grid(visible=False)
        axes.spines.left.set_visible(True)
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.set_xlabel("epoch" if one is drawn[-1] else "")

    return Figure(
        title,
        f"How the keep-probabilities s of all units spread over {NUM_BINS} bins from 0 to 1, epoch by epoch, for the "
        "first seed of each search. Stronger means more units, on a scale of square roots. Units within 0.05 of 0 or 1 "
        "count as certain.",
        _panels(f"{title}: {series[0].row.network}", drawn, paint, height=90, gap=48, foot=16),
    )


def densities(run: Record) -> NDArray[np.float64]:
    """Bins x epochs: the square root of each bin's share of the units, because at the end nearly all are 0 or 1."""
    counts = np.array([epoch.keep_probs for epoch in run.history if epoch.keep_probs], dtype=np.float64)
    parts = np.array_split(counts, min(len(counts), MAX_COLUMNS))
    sums = np.stack([part.sum(axis=0) for part in parts])
    shares: NDArray[np.float64] = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
    return np.sqrt(shares).T


def _panels(
    title: str,
    series: Sequence[Series],
    paint: Callable[[Axes, Series], None],
    height: float,
    gap: float,
    foot: float,
) -> str:
    def paint_all(canvas: Canvas) -> None:
        for i, one in enumerate(series):
            paint(add_axes(canvas, 24 + i * (height + gap), height), one)

    return svg(title, 24 + len(series) * (height + gap) - gap + 24 + foot, paint_all)


def step_time(series: Sequence[Series]) -> Figure | None:
    title = "Time of a training step"
    drawn = [one for one in series if one.row.mean(lambda run: run.step_ms) is not None]
    if not drawn:
        return None

    def paint(axes: Axes, one: Series, y: float) -> str:
        row = one.row
        total = row.mean(lambda run: run.step_ms) or 0
        forward, backward = (
            row.mean(lambda run: run.step_forward_ms) or 0,
            row.mean(lambda run: run.step_backward_ms) or 0,
        )
        ends = (0, forward, forward + backward, max(total, forward + backward))
        for start, end, alpha in zip(ends, ends[1:], (1, 0.6, 0.3), strict=False):
            axes.barh(y, end - start, 0.4, start, color=COLORS[one.role], alpha=alpha, linewidth=0)
        dense, narrow = row.mean(lambda run: run.dense_step_ms), row.mean(lambda run: run.narrow_step_ms)
        for reference, dashes in ((dense, None), (narrow, (1.2, 1.2))):
            if reference is not None:
                stroke = axes.plot([reference] * 2, [y - 0.28, y + 0.28], color=COLORS["ink"], linestyle=(0, dashes))
                stroke[0].set_dash_capstyle("butt")
        return number(total, " ms")

    return Figure(
        title,
        "Milliseconds of one step on the machine of the run, mean over the seeds: forwards in full colour, backward "
        "lighter, the rest (masks, moving weights, optimizer) lightest. The solid stroke is a step of the dense "
        "network, the dotted one a step of a uniform network of equal FLOPs.",
        _bars(f"{title}: {series[0].row.network}", drawn, paint, "ms"),
    )


def training_time(series: Sequence[Series]) -> Figure | None:
    if len(series) < 2:  # one bar shows nothing that the table does not
        return None
    title = "Time of the whole training"
    size, unit = time_unit(max(one.row.mean(_seconds) or 0 for one in series))

    def paint(axes: Axes, one: Series, y: float) -> str:
        seconds = one.row.mean(_seconds) or 0
        axes.barh(y, seconds / size, 0.4, color=COLORS[one.role], linewidth=0)
        return duration(seconds)

    return Figure(
        title,
        "Wall-clock time of all epochs, without evaluation, mean over the seeds.",
        _bars(f"{title}: {series[0].row.network}", series, paint, unit),
    )


def _seconds(run: Record) -> float:
    return run.train_seconds


def _bars(title: str, series: Sequence[Series], paint: Callable[[Axes, Series, float], str], unit: str) -> str:
    """Bars with their labels above them, in the whole width; `paint` draws a bar and returns the text of its value."""
    height = 40.0 * len(series)

    def paint_all(canvas: Canvas) -> None:
        axes = add_axes(canvas, 6, height, left=6, right=14)
        for i, one in enumerate(series):
            value = paint(axes, one, i + 0.16)
            for x, text, ha, role in ((0, short(one.row.label), "left", "ink"), (1, value, "right", "muted")):
                at = axes.get_yaxis_transform()
                axes.text(x, i - 0.26, text, ha=ha, va="center", color=COLORS[role], transform=at)
        axes.set_xlim(left=0)
        axes.set_ylim(len(series) - 0.45, -0.5)
        axes.set_yticks([])
        axes.grid(visible=True, axis="x")
        axes.spines.bottom.set_visible(False)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.xaxis.set_major_formatter(plain)
        axes.set_xlabel(unit)

    return svg(title, height + 46, paint_all)

"""The figures of studies as SVG files: variances by layer; E[L^2], V and V_max by epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes

from slimstart.io import atomic
from slimstart.lab.reports.canvas import COLORS, FONT, LEFT, Canvas, add_axes, alone, plain, short, svg, write_above
from slimstart.lab.reports.series import DASHES, MARKERS
from study.records import FlipRow, Study, VarianceRow

HEIGHT = 330.0
NAMES = {"vr_pge": "VR-PGE", "pge": "PGE", "vr_pge_symmetric": "VR-PGE, symmetric", "leave_one_out": "leave one out"}

Line = tuple[str, list[float], list[float], list[float]]
"""Label, places, values, standard errors."""


def write(study: Study, path: str | os.PathLike[str]) -> None:
    """Write the figure, atomically."""
    atomic.write(path, draw(study).encode())


def draw(study: Study) -> str:
    """The figure, the same bytes for the same record."""
    if study.variance:
        layers = [row.layer for row in study.variance if row.layer is not None]
        lines = list(_variances(study.variance, list(dict.fromkeys(layers))))
        title, above, below = "Variance of the structure gradient", "mean over the channels of a layer", "layer"
    else:
        lines = list(_flips(study.flip))
        title, above, below = "Losses of sampled networks", "squared losses and differences", "epoch"

    def paint(canvas: Canvas) -> None:
        axes = add_axes(canvas, 66, HEIGHT - 106, left=LEFT + 10)
        write_above(axes, above, short(study.network, 44), color="muted", indent=LEFT + 10)
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter(plain)
        for i, line in enumerate(lines):
            _plot(axes, i, line)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.set_xlabel(below)
        canvas.legend(loc="upper left", ncols=2, frameon=False, fontsize=FONT - 1.5, borderaxespad=0.2)

    return alone(svg(f"{title}: {study.network}", HEIGHT, paint))


def _plot(axes: Axes, number: int, line: Line) -> None:
    label, places, values, errors = line
    axes.errorbar(
        places,
        values,
        yerr=errors,
        color=COLORS[f"series-{1 + number % 6}"],
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
        linestyle=(0, DASHES[number % len(DASHES)] or None),
        elinewidth=1,
        label=label,
    )


def _variances(rows: Sequence[VarianceRow], layers: Sequence[str]) -> Iterator[Line]:
    """One line for each estimator, over the layers in the order of the network."""
    for estimator in dict.fromkeys(row.estimator for row in rows):
        own = [row for row in rows if row.estimator == estimator and row.layer is not None and row.variance > 0]
        places = [1.0 + layers.index(row.layer) for row in own if row.layer is not None]
        yield _name_of(estimator), places, [row.variance for row in own], [row.standard_error for row in own]


def _flips(rows: Sequence[FlipRow]) -> Iterator[Line]:
    epochs = [float(row.epoch) for row in rows]
    for label, field in (("E[L²]", "squared_loss"), ("V", "dispersion"), ("V max", "max_dispersion")):
        yield label, epochs, [getattr(row, field) for row in rows], [getattr(row, f"{field}_error") for row in rows]
    yield "V max, biased upwards", epochs, [row.max_dispersion_naive for row in rows], [0.0] * len(rows)


def _name_of(estimator: str) -> str:
    """An estimator's name, as the paper has it."""
    whole = estimator.removesuffix("_plain")
    return NAMES.get(whole, whole) + (" without H" if whole != estimator else "")

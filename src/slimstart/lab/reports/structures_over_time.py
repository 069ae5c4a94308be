"""The figure of what a search learned: the width of every layer over time, and which layers were removed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes

from slimstart.lab.records import Record
from slimstart.lab.reports.canvas import COLORS, FONT, WIDTH, Canvas, Figure, add_axes, short, svg, write_above
from slimstart.lab.reports.series import Series
from slimstart.lab.reports.tables import number

TITLE = "Widths over time"
WIDER, NARROWER = "series-1", "series-2"
MAX_PANELS = 3
MAX_STRIPS = 20_000  # parts of strips in a panel; of more structures, only some are drawn
LINE, NAMES, NUMBERS = 13.0, 92.0, 78.0  # height of a line of text; margins for the names and the numbers of layers


def widths_over_time(series: Sequence[Series]) -> Figure | None:
    """Each layer is a strip: its colour says how wide it is against its width at the start."""
    runs = {one: one.row.first for one in series}
    drawn = [one for one, run in runs.items() if run.layers and len(run.structures or ()) > 1][:MAX_PANELS]
    if not drawn:
        return None
    heights = [max(90.0, min(LINE, 420 / len(_names(one.row.first))) * len(_names(one.row.first))) for one in drawn]

    full = max(0.5, *(abs(change) for one in drawn for change in _changes(one.row.first)))

    def paint(canvas: Canvas) -> None:
        top = 24.0
        for one, height in zip(drawn, heights, strict=True):
            _paint(add_axes(canvas, top, height, left=NAMES, right=NUMBERS), one, height, full)
            top += height + 58

    caption = (
        "Every layer from the first to the last, over the epochs in which widths changed; after them the structure is "
        "fixed. Blue: wider than at the start; orange: narrower; the stronger the colour, the larger the change, up to "
        f"a factor of {number(2**full)}. Numbers: filters in the finished network, of dense. First seed of each search."
    )
    removed = any(structure.removed_layers for one in drawn for structure in one.row.first.structures or ())
    caption += " Grey with a line: the layer was removed." if removed else ""
    title = f"{TITLE}: {series[0].row.network}"
    return Figure(TITLE, caption, svg(title, sum(heights) + 58 * len(drawn), paint))


def _changes(run: Record) -> Iterator[float]:
    """Logarithms to base 2 of all widths against those at the start."""
    first, *others = run.structures or ()
    for structure in others:
        for name, width in structure.widths.items():
            if width and first.widths.get(name):
                yield math.log2(width / first.widths[name])


def _names(run: Record) -> list[str]:
    """Layers whose width a search can change, in the order of the network."""
    structures = run.structures or ()
    return [
        layer.name
        for layer in run.layers
        if len({structure.widths.get(layer.name) for structure in structures}) > 1
        or any(layer.name in structure.removed_layers for structure in structures)
    ] or [layer.name for layer in run.layers]


def _paint(axes: Axes, one: Series, height: float, full: float) -> None:
    """Draw the strips; `full` is the logarithm to base 2 of a change in full colour."""
    run = one.row.first
    structures = run.structures or ()
    names = _names(run)
    first, last = structures[0], structures[-1]
    end = min(float(run.epochs), last.start + 0.25 * (last.start - first.start))
    write_above(axes, short(one.row.label), f"{len(structures) - 1} changes", indent=NAMES)
    structures = structures[:: math.ceil(len(names) * len(structures) / MAX_STRIPS)]
    moments = [*(structure.start for structure in structures), end]
    for i, name in enumerate(names):
        start = first.widths.get(name, 0)
        for structure, left, right in zip(structures, moments, moments[1:], strict=False):
            width = structure.widths.get(name, 0)
            if name in structure.removed_layers or not width:
                axes.barh(i, right - left, 0.86, left, color=COLORS["dense"], alpha=0.35, linewidth=0)
                axes.plot([left, right], [i, i], color=COLORS["ink"], linewidth=1)
            elif start:
                change = math.log2(width / start)
                color, alpha = COLORS[WIDER if change > 0 else NARROWER], abs(change) / full
                axes.barh(i, right - left, 0.86, left, color=color, alpha=alpha, linewidth=0)
        axes.plot([first.start, end], [i + 0.5, i + 0.5], color=COLORS["line"], linewidth=0.5)
    axes.set_xlim(first.start, end)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False)
    step = math.ceil(len(names) * LINE / height)
    axes.set_yticks(range(0, len(names), step), [short(name, 15) for name in names[::step]], fontsize=FONT - 1.5)
    layers = {layer.name: layer for layer in run.layers}
    for i in range(0, len(names), step):
        layer = layers[names[i]]
        removed = layer.name in last.removed_layers
        text = "removed" if removed else f"{layer.width:,} of {layer.dense:,}"
        place = ((WIDTH - NUMBERS - NAMES) + NUMBERS - 12) / (WIDTH - NUMBERS - NAMES)
        axes.text(
            place,
            i,
            text,
            ha="right",
            va="center",
            fontsize=FONT - 1.5,
            color=COLORS["muted"],
            transform=axes.get_yaxis_transform(),
        )
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, min_n_ticks=2))
    axes.set_xlabel("epoch")

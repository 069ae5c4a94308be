"""The figures of the README and of docs/, as SVG for light and for dark pages.

The SVG is written by hand: it needs no fonts of its own, and is the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from pages.accuracy import Comparison, comparisons
from pages.stored import Results
from pages.structure_tables import Structure, settings
from slimstart.lab.reports.rows import Row

THEMES = {  # as the report of a run has them
    "light": {"ink": "#1a1f26", "muted": "#5b6572", "line": "#dde1e7", "uniform": "#6d7682", "slimstart": "#3577dc"},
    "dark": {"ink": "#e7eaee", "muted": "#a0a9b5", "line": "#323a45", "uniform": "#98a2ae", "slimstart": "#77b7f7"},
}
OTHER = {"light": "#c76a15", "dark": "#f07a4c"}  # of the best shallower network
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def _figure(width: int, height: int, font_size: str, colors: dict[str, str], title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="{font_size}" fill="{colors["ink"]}">'
    )
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>"]) + "\n"


def _label(x: str, y: str, text: object, colors: dict[str, str], anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colors["muted"]}">{text}</text>'


# --- accuracy against the uniform network at equal FLOPs --------------------------------------------------------------

WIDTH, MARGIN, TOP, ROW, BOTTOM = 640, 12, 44, 62, 52
LANE = 28, 56  # of the points, below the label of a row


def accuracies(results: Results, theme: str) -> str:
    """A row for each network, with means and standard deviations over seeds."""
    found = comparisons(results)
    low, high = _range(found)
    height = TOP + ROW * len(found) + BOTTOM
    colors = {**THEMES[theme], "shallower": OTHER[theme]}
    title = "Accuracy of slimstart against the uniform network of equal FLOPs"

    def place(points: float) -> float:
        return MARGIN + 8 + (WIDTH - 2 * MARGIN - 16) * (points - low) / (high - low)

    parts = list(_legend(colors, any(one.shallower for one in found)))
    bottom = TOP + ROW * len(found)
    for tick in range(low, high + 1):
        x, is_start = place(tick), tick == 0
        stroke = colors["muted"] if is_start else colors["line"]
        lanes = "".join(f"M{x:.1f} {TOP + ROW * i + LANE[0]}v{LANE[1] - LANE[0]}" for i in range(len(found)))
        parts.append(f'<path d="{lanes}" stroke="{stroke}"/>')
        if high - low > 12 and tick % 2:
            continue  # there is no space for all numbers
        text = f"{tick:+d}".replace("-", "−") if tick else "0"
        parts.append(_label(f"{x:.1f}", f"{bottom + 18}", text, colors))
    text = "test accuracy against uniform in points, mean ± standard deviation over seeds"
    parts.append(_label(f"{WIDTH / 2:g}", f"{bottom + 40}", text, colors))
    for i, one in enumerate(found):
        y = TOP + ROW * i
        parts.append(f'<text x="{MARGIN}" y="{y + 20}">{escape(one.title)}</text>')
        values = f"{one.uniform.accuracy:.1f} → {one.slimstart.accuracy:.1f} %"
        parts.append(f'<text x="{WIDTH - MARGIN}" y="{y + 20}" text-anchor="end">{values}</text>')
        for name, row, shift in _points(one):
            x, spread = place(row.accuracy - one.uniform.accuracy), row.spread(lambda run: run.accuracy) or 0.0
            half = spread * (place(1) - place(0))
            parts.append(
                f'<path d="M{x - half:.1f} {y + 42 + shift}H{x + half:.1f}" stroke="{colors[name]}" '
                'stroke-width="3" stroke-linecap="round" opacity="0.45"/>'
            )
            parts.append(f'<circle cx="{x:.1f}" cy="{y + 42 + shift}" r="5.5" fill="{colors[name]}"/>')
    return _figure(WIDTH, height, "15.5", colors, title, parts)


def _points(one: Comparison) -> Iterator[tuple[str, Row, int]]:
    """What is drawn of a network, with a small shift so that equal values remain visible."""
    yield "uniform", one.uniform, -5
    if one.shallower is not None:
        yield "shallower", one.shallower, 0
    yield "slimstart", one.slimstart, 5


def _range(found: list[Comparison]) -> tuple[int, int]:
    """Whole points around everything that is drawn."""
    ends = [0.0]
    for one in found:
        for _, row, _ in _points(one):
            difference, spread = row.accuracy - one.uniform.accuracy, row.spread(lambda run: run.accuracy) or 0.0
            ends += [difference - spread, difference + spread]
    return math.floor(min(ends)), math.ceil(max(ends))


def _legend(colors: dict[str, str], with_shallower: bool) -> Iterator[str]:
    x = MARGIN + 6
    names = {"uniform": "uniform", "shallower": "best shallower network", "slimstart": "slimstart"}
    for name, text in names.items():
        if name == "shallower" and not with_shallower:
            continue
        yield f'<circle cx="{x}" cy="20" r="5.5" fill="{colors[name]}"/><text x="{x + 12}" y="25">{text}</text>'
        x += 40 + 9 * len(text)


# --- accuracy by number of layers at equal FLOPs, from the table of structures ----------------------------------------

PANEL, COLUMNS = (320, 190), 2  # width and height
LEFT, RIGHT, ABOVE, BELOW = 40, 12, 34, 40


def structures(results: Results, theme: str) -> str:
    """A panel for each setting."""
    colors, found = THEMES[theme], settings(results)
    width, height = PANEL[0] * COLUMNS, PANEL[1] * -(-len(found) // COLUMNS) + 30
    parts = [
        f'<circle cx="{LEFT}" cy="16" r="4.5" fill="{colors["uniform"]}"/><text x="{LEFT + 10}" y="20">widths set by '
        f'hand</text><circle cx="{LEFT + 160}" cy="16" r="4.5" fill="{colors["slimstart"]}"/>'
        f'<text x="{LEFT + 170}" y="20">widths learned</text>',
    ]
    for number, (title, tried) in enumerate(found.items()):
        row, column = divmod(number, COLUMNS)
        parts.append(f'<g transform="translate({PANEL[0] * column} {PANEL[1] * row + 30})">')
        parts += [*_panel(title, tried, colors), "</g>"]
    return _figure(width, height, "13", colors, "Accuracy by number of layers, at equal FLOPs", parts)


def _panel(title: str, tried: list[Structure], colors: dict[str, str]) -> Iterator[str]:
    layers, accuracies = [one.layers for one in tried], [one.test for one in tried]
    low, high = int(min(accuracies)), int(max(accuracies)) + 1
    first, last = min(layers) - 0.5, max(layers) + 0.5

    def place(number: float, accuracy: float) -> tuple[float, float]:
        x = LEFT + (PANEL[0] - LEFT - RIGHT) * (number - first) / (last - first)
        return x, PANEL[1] - BELOW - (PANEL[1] - ABOVE - BELOW) * (accuracy - low) / (high - low)

    yield f'<text x="8" y="20" font-size="12">{escape(title)}</text>'  # the longest is almost as wide as a panel
    for tick in sorted({low, round((low + high) / 2), high}):
        _, y = place(first, tick)
        yield f'<path d="M{LEFT} {y:.1f}H{PANEL[0] - RIGHT}" stroke="{colors["line"]}"/>'
        yield _label(f"{LEFT - 6}", f"{y + 4:.1f}", tick, colors, anchor="end")
    for number in sorted(set(layers)):
        x, y = place(number, low)
        yield _label(f"{x:.1f}", f"{y + 16:.1f}", number, colors)
    middle = (LEFT + PANEL[0] - RIGHT) / 2
    yield _label(f"{middle:g}", f"{PANEL[1] - 8}", "layers", colors)
    for one in sorted(tried, key=lambda one: one.learned):
        x, y = place(one.layers, one.test)
        color = colors["slimstart" if one.learned else "uniform"]
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}" opacity="0.85"/>'

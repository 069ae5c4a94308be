"""A figure for the README: accuracy against the uniform network at equal FLOPs, as SVG for light and for dark pages.

The SVG is written by hand: it needs no fonts of its own, and is the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from pages.accuracy import Comparison, comparisons
from pages.stored import Results
from slimstart.lab.reports.rows import Row

THEMES = {  # as the report of a run has them
    "light": {"ink": "#1a1f26", "muted": "#5b6572", "line": "#dde1e7", "uniform": "#6d7682", "slimstart": "#3577dc"},
    "dark": {"ink": "#e7eaee", "muted": "#a0a9b5", "line": "#323a45", "uniform": "#98a2ae", "slimstart": "#77b7f7"},
}
OTHER = {"light": "#c76a15", "dark": "#f07a4c"}  # of the best shallower network
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
WIDTH, MARGIN, TOP, ROW, BOTTOM = 640, 12, 44, 62, 52
LANE = 28, 56  # of the points, below the label of a row


def draw(results: Results, theme: str) -> str:
    """The figure: a row for each network, with means and standard deviations over seeds."""
    found = comparisons(results)
    low, high = _range(found)
    height = TOP + ROW * len(found) + BOTTOM
    colors = {**THEMES[theme], "shallower": OTHER[theme]}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="15.5" fill="{colors["ink"]}">',
        "<title>Accuracy of slimstart against the uniform network of equal FLOPs</title>",
    ]

    def place(points: float) -> float:
        return MARGIN + 8 + (WIDTH - 2 * MARGIN - 16) * (points - low) / (high - low)

    parts += _legend(colors, any(one.shallower for one in found))
    bottom = TOP + ROW * len(found)
    for tick in range(low, high + 1):
        x, is_start = place(tick), tick == 0
        stroke = colors["muted"] if is_start else colors["line"]
        lanes = "".join(f"M{x:.1f} {TOP + ROW * i + LANE[0]}v{LANE[1] - LANE[0]}" for i in range(len(found)))
        parts.append(f'<path d="{lanes}" stroke="{stroke}"/>')
        if high - low > 12 and tick % 2:
            continue  # there is no space for all numbers
        text = f"{tick:+d}".replace("-", "−") if tick else "0"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{colors["muted"]}">{text}</text>')
    parts.append(
        f'<text x="{WIDTH / 2:g}" y="{bottom + 40}" text-anchor="middle" fill="{colors["muted"]}">'
        "test accuracy against uniform in points, mean ± standard deviation over seeds</text>"
    )
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
    return "\n".join([*parts, "</svg>"]) + "\n"


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

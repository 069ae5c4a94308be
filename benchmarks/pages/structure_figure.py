"""A figure of the table of structures: accuracy by number of layers at equal FLOPs, as SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from pages.accuracy_figure import FONT, THEMES
from pages.stored import Results
from pages.structure_tables import Structure, settings

WIDTH, HEIGHT, COLUMNS = 320, 190, 2  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 34, 40


def draw(results: Results, theme: str) -> str:
    """A panel for each setting."""
    colors, found = THEMES[theme], settings(results)
    width, height = WIDTH * COLUMNS, HEIGHT * -(-len(found) // COLUMNS) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="13" fill="{colors["ink"]}">',
        "<title>Accuracy by number of layers, at equal FLOPs</title>",
        f'<circle cx="{LEFT}" cy="16" r="4.5" fill="{colors["uniform"]}"/><text x="{LEFT + 10}" y="20">widths set by '
        f'hand</text><circle cx="{LEFT + 160}" cy="16" r="4.5" fill="{colors["slimstart"]}"/>'
        f'<text x="{LEFT + 170}" y="20">widths learned</text>',
    ]
    for number, (title, structures) in enumerate(found.items()):
        row, column = divmod(number, COLUMNS)
        parts.append(f'<g transform="translate({WIDTH * column} {HEIGHT * row + 30})">')
        parts += [*_panel(title, structures, colors), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, structures: list[Structure], colors: dict[str, str]) -> Iterator[str]:
    layers, accuracies = [one.layers for one in structures], [one.test for one in structures]
    low, high = int(min(accuracies)), int(max(accuracies)) + 1
    first, last = min(layers) - 0.5, max(layers) + 0.5

    def place(number: float, accuracy: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (number - first) / (last - first)
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (accuracy - low) / (high - low)

    yield f'<text x="8" y="20" font-size="12">{escape(title)}</text>'  # the longest is almost as wide as a panel
    for tick in sorted({low, round((low + high) / 2), high}):
        _, y = place(first, tick)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{colors["line"]}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{colors["muted"]}">{tick}</text>'
    for number in sorted(set(layers)):
        x, y = place(number, low)
        yield f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle" fill="{colors["muted"]}">{number}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle:g}" y="{HEIGHT - 8}" text-anchor="middle" fill="{colors["muted"]}">layers</text>'
    for one in sorted(structures, key=lambda one: one.learned):
        x, y = place(one.layers, one.test)
        color = colors["slimstart" if one.learned else "uniform"]
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}" opacity="0.85"/>'

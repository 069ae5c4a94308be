"""Looks of rows, the same in all figures and tables of a page: colour and marker by method, dashes by budget.

If a network has many rows, each budget has a panel of its own, and methods with the same colour have different dashes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slimstart.lab.reports.rows import Row

NUM_COLORS = 6
MAX_CURVES = 8  # on one pair of axes
# Names of colours; page.html has their values for light and for dark.
ROLES = ("ink", "muted", "line", "dense", *(f"series-{i + 1}" for i in range(NUM_COLORS)))

Shape = tuple[tuple[float, float], ...]

_CIRCLE: Shape = tuple((math.cos(k * math.pi / 10), math.sin(k * math.pi / 10)) for k in range(20))
# Polygons about 0, y upwards: both matplotlib and a hand-written <polygon> take them.
MARKERS: tuple[Shape, ...] = (
    _CIRCLE,
    ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    ((0, 1.1), (1, -0.8), (-1, -0.8)),
    ((0, 1.2), (1.2, 0), (0, -1.2), (-1.2, 0)),
    ((0, -1.1), (1, 0.8), (-1, 0.8)),
    tuple((0.45 * x, y) for x, y in _CIRCLE),
    ((-1.1, 0), (0.8, 1), (0.8, -1)),
)
DASHES: tuple[tuple[float, ...], ...] = ((), (4.5, 2.5), (0.6, 2.4), (6, 2, 1, 2))


@dataclass(frozen=True)
class Series:
    """A row with its colour, marker and dashes; `role` is the name of a colour."""

    row: Row
    role: str
    marker: Shape
    dashes: tuple[float, ...]

    @property
    def linestyle(self) -> tuple[int, tuple[float, ...] | None]:
        """The dashes in the form of matplotlib, in units of the line width."""
        return 0, self.dashes or None

    @property
    def key(self) -> str:
        """A short stroke with the marker, as SVG, for legends."""
        points = " ".join(f"{15 + 4 * x:.1f},{6 - 4 * y:.1f}" for x, y in self.marker)
        dashes = " ".join(f"{1.7 * dash:g}" for dash in self.dashes) or "none"
        return (
            f'<svg class="key" viewBox="0 0 30 12" aria-hidden="true" style="color: var(--{self.role})">'
            f'<path d="M1 6H29" style="stroke-dasharray: {dashes}"/><polygon points="{points}"/></svg>'
        )


def series_of(rows: Sequence[Row]) -> list[Series]:
    """The rows of a page with their looks. Dense is grey; slimstart has the first colours on every page."""
    ours = {row.method: row.first.method != "slimstart" for row in rows if row.first.method != "dense"}
    methods = sorted(ours, key=lambda name: (ours[name], name))
    ranks: dict[tuple[str, str], int] = {}
    found = []
    for row in rows:
        rank = ranks[row.network, row.method] = ranks.get((row.network, row.method), -1) + 1
        # The numbers of colours and of shapes have no common factor, so that pairs of them repeat late.
        i = methods.index(row.method) if row.method in ours else -1
        role = "dense" if i < 0 else f"series-{i % NUM_COLORS + 1}"
        crowded = sum(row.network == other.network for other in rows) > MAX_CURVES
        dashes = DASHES[(max(i, 0) // NUM_COLORS if crowded else rank) % len(DASHES)]
        found.append(Series(row, role, MARKERS[max(i, 0) % len(MARKERS)], dashes))
    return found

"""A canvas for small figures: SVG that takes its colours and its font from the page around it.

matplotlib knows no CSS variables, so figures are drawn in placeholder colours, one per role, which are replaced by
`var(--role)` in the SVG: the page decides between light and dark. Lengths are in units of the viewBox, which is `WIDTH`
units wide.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from matplotlib import figure, style, ticker
from matplotlib.axes import Axes

from slimstart.lab.reports.series import ROLES, Series

Canvas = figure.Figure

WIDTH, LEFT, RIGHT = 400.0, 38.0, 12.0
FONT = 11.5
COLORS = {role: f"#fe01{i:02x}" for i, role in enumerate(ROLES)}
_ROLE_OF = {color: role for role, color in COLORS.items()}

_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": FONT,
    "text.color": COLORS["ink"],
    "axes.labelcolor": COLORS["muted"],
    "axes.edgecolor": COLORS["line"],
    "axes.facecolor": "none",
    "axes.labelsize": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "lines.dash_capstyle": "round",
    **{f"{axis}tick.{key}": value for axis in "xy" for key, value in (("color", COLORS["muted"]), ("major.size", 0))},
}


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption and what its colours mean."""

    title: str
    caption: str
    svg: str
    keys: tuple[tuple[Series, str], ...] = ()


def svg(title: str, height: float, paint: Callable[[Canvas], None]) -> str:
    """An <svg> element, the same bytes for the same input; `title` must be unique on its page."""
    with warnings.catch_warnings(), style.context(["default", {**_STYLE, "svg.hashsalt": title}]):
        # The browser has other fonts than matplotlib.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        canvas = Canvas(figsize=(WIDTH / 72, height / 72), facecolor="none")
        paint(canvas)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    body = re.sub(r"<[^<>]*>", _themed, re.sub(r"<style.*?</style>", "", buffer.getvalue(), flags=re.DOTALL))
    body = body[body.index("<g>") :]  # after the declarations and the <svg> tag
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img"><title>{html.escape(title)}</title>{body}'


def _themed(tag: re.Match[str]) -> str:
    """One tag without names of groups, which are not unique on a page, and without colours or fonts of its own."""
    text = re.sub(r'^<g id="[^"]*"', "<g", tag[0].replace("\n", ""))
    text = re.sub(r'font-family: [^;"]*;? ?', "", text)
    return re.sub("|".join(_ROLE_OF), lambda color: f"var(--{_ROLE_OF[color[0]]})", text)


def add_axes(canvas: Canvas, top: float, height: float, left: float = LEFT, right: float = RIGHT) -> Axes:
    """Add axes at a distance from the top of the canvas."""
    whole = canvas.get_figheight() * 72
    return canvas.add_axes((left / WIDTH, 1 - (top + height) / whole, (WIDTH - left - right) / WIDTH, height / whole))


def write_above(axes: Axes, left: str, right: str = "", color: str = "ink", indent: float = 0) -> None:
    """Write above the axes, at the left and at the right; vertical axes have their labels there, too."""
    for text, x, dx, ha, role in ((left, 0, -indent, "left", color), (right, 1, 0, "right", "muted")):
        axes.annotate(text, (x, 1), (dx, 7), "axes fraction", textcoords="offset points", ha=ha, color=COLORS[role])


def log_scale(axes: Axes, side: Literal["x", "y"], values: Sequence[float]) -> bool:
    """Put an axis on a logarithmic scale with few ticks, if its values differ by a factor of three or more."""
    low, high = min(values), max(values)
    if not 0 < 3 * low < high:
        return False
    axes.set(**{f"{side}scale": "log"})
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 30 * low else (1, 3), numticks=9))
    axis.set_minor_locator(ticker.NullLocator())
    return True


def short(text: str, length: int = 34) -> str:
    """A name in one line of at most `length` characters; the middle is cut out, because names differ at their ends."""
    text = "".join(c if c.isprintable() else " " for c in text)
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


@ticker.FuncFormatter
def percent(value: float, _: int | None = None) -> str:
    return f"{plain(float(f'{100 * value:.3g}'))} %"


@ticker.FuncFormatter
def plain(value: float, _: int | None = None) -> str:
    return f"{value:,.10g}" if value < 1e5 else f"{value:.0e}"


def alone(element: str) -> str:
    """An <svg> element as a file, with the colours of the report page."""
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    colors = re.findall(r"^(?::root|@media \(prefers-color-scheme: dark\)) \{\n.*?^\}", page, re.MULTILINE | re.DOTALL)
    looks = "\n".join([*colors, "svg { background: var(--page); font-family: system-ui, sans-serif; }"])
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return element.replace("<svg ", f"<svg {names} ", 1).replace("</title>", f"</title><style>{looks}</style>", 1)

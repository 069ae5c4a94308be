"""The table of structures: networks of equal FLOPs that differ in their number of layers (`structures/`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pages.naming import data_title
from pages.stored import Results
from slimstart.lab.reports.tables import markdown_table

FAMILIES = {"vgg": "VGG-19", "residual": "ResNet-32", "inverted": "MobileNetV2", "separable": "MobileNetV1"}


@dataclass(frozen=True)
class Structure:
    """One structure in one setting: means over its seeds.

    Attributes:
        name: layers of each stage, then the tilt of the widths.
        learned: whether widths were learned.
    """

    name: str
    learned: bool
    layers: int
    validation: float
    test: float

    @property
    def depths(self) -> str:
        return ",".join(self.name.partition("-")[0])


def settings(results: Results) -> dict[str, list[Structure]]:
    """The structures of each family, data set and budget, by its title."""
    found: dict[str, dict[tuple[str, Any], list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in results.structures:
        title = f"{FAMILIES[record['family']]}, {data_title(record['data'])}, {100 * record['budget']:g} %"
        found[title][record["structure"], record["tilt"]].append(record)
    return {title: [_structure(runs) for runs in table.values()] for title, table in sorted(found.items())}


def _structure(runs: list[Mapping[str, Any]]) -> Structure:
    return Structure(
        runs[0]["structure"],
        runs[0]["tilt"] is not None,
        runs[0]["layers"],
        fmean(run["validation_accuracy"] for run in runs),
        fmean(run["test_accuracy"] for run in runs),
    )


def table(results: Results) -> str:
    """For each setting the deepest structure, and the best on held-out images, without and with a search for widths."""
    names, score = (
        ("family, data, FLOPs", "deepest tried", "best, widths set by hand", "best, widths learned"),
        "test, %",
    )
    lines = [[names[0], "networks", names[1], score, names[2], score, names[3], score]]
    for title, structures in settings(results).items():
        deepest = max(structures, key=lambda one: (one.layers, not one.learned))
        cells = [title, str(len(structures)), deepest.depths, f"{deepest.test:.1f}"]
        for learned in (False, True):
            some = [one for one in structures if one.learned is learned]
            best = max(some, key=lambda one: one.validation, default=None)
            tilt = " (late)" if best and best.name.endswith("late") else ""
            cells += ["–", "–"] if best is None else [best.depths + tilt, f"{best.test:.1f}"]
        lines.append(cells)
    return "\n".join(markdown_table(lines, names))

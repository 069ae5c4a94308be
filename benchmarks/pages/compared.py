"""What a row of a table is compared with: the paper's row, and the uniform network of equal FLOPs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimstart.lab.recipes.presets import COMPARED, PRESETS
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.reports.rows import ITS_ESTIMATOR, SAME, Row, policy_of

# The paper's estimator, and that of its authors' release: its rows are about these.
ESTIMATORS = (ITS_ESTIMATOR, "vr_pge_symmetric")
# The FLOPs of the uniform network may differ by this factor from those of the row that it is compared with.
NEAR = 1.05
# Settings that runs must share to be compared, in addition to network, data, batch size and epochs.
SHARED = ("precision", "width", "image_size", "validation")
DEFAULTS: Mapping[str, Any] = dataclasses.asdict(Recipe())


@dataclass(frozen=True)
class Published:
    """A row of the paper: percent, and ratios. What it does not report is None."""

    model: str
    data: str
    method: str
    accuracy: float
    params: float | None
    flops: float
    saving: float | None
    epochs: tuple[int, int] | None = None  # of its recipe: of training, and of fine-tuning
    protocol: str = "original"


def published() -> list[Published]:
    """The rows of the paper: those of presets, with their epochs, and those of methods that have no preset."""
    rows = {key: Published(*key, p.accuracy, p.params, p.flops, p.train_cost_saving) for key, p in COMPARED.items()}
    repeated = []
    for recipe, paper in ((preset.recipe, preset.paper) for preset in PRESETS.values()):
        if paper is not None:
            key = (recipe.model, recipe.data, recipe.method)
            rows.pop(key, None)
            numbers = (paper.accuracy, paper.params, paper.flops, paper.train_cost_saving)
            epochs = (recipe.epochs, recipe.finetune_epochs)
            repeated.append(Published(*key, *numbers, epochs, recipe.protocol))
    return [*rows.values(), *repeated]


@dataclass(frozen=True, eq=False)
class Line:
    """A row with the paper's row and the uniform network of equal FLOPs, where there are such."""

    row: Row
    paper: Published | None
    uniform: Row | None

    @property
    def is_short(self) -> bool:
        """Whether it had fewer epochs than the paper's recipe has."""
        epochs = None if self.paper is None else self.paper.epochs
        return epochs is not None and self.row.first.epochs < sum(epochs)


def lines_of(rows: Sequence[Row], paper: Sequence[Published]) -> list[Line]:
    """The rows of one table: dense first, then by budget, and under each from the best to the worst."""
    budgets: dict[str | None, list[float]] = {}
    for row in rows:
        budgets.setdefault(row.first.budget, []).append(row.flops)

    def order(row: Row) -> tuple[Any, ...]:
        budget = budgets[row.first.budget]
        return (row.first.method != "dense", -sum(budget) / len(budget), row.first.budget or "", -row.accuracy)

    return [Line(row, _paper_of(row, paper), _uniform_of(row, rows)) for row in sorted(rows, key=order)]


def _uniform_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """The uniform network with about the FLOPs of a row: of those with equal FLOPs, the best."""
    if row.first.method == "dense" or _is_uniform(row):
        return None
    near = [
        one for one in rows if _is_uniform(one) and _shared(one) == _shared(row) and apart(one.flops, row.flops) <= NEAR
    ]
    return min(near, key=lambda one: (max(SAME, apart(one.flops, row.flops)), -one.accuracy), default=None)


def _is_uniform(row: Row) -> bool:
    return row.first.method == "uniform" and row.first.config.get("protocol") != "front_heavy"


def _shared(row: Row) -> tuple[object, ...]:
    run, settings = row.first, {**DEFAULTS, **row.first.config}
    return (run.model, run.data, run.batch_size, run.epochs, *map(settings.get, SHARED))


def _paper_of(row: Row, paper: Iterable[Published]) -> Published | None:
    """The paper's row about this method and network, of the same protocol if there is one, the nearest in FLOPs."""
    first, config = row.first, row.first.config
    if config.get("width", 1) != 1 or config.get("validation", 0):  # another network, or other images to test on
        return None
    estimator = config.get("estimator") or ITS_ESTIMATOR
    if first.method == "slimstart" and not (estimator in ESTIMATORS and policy_of(first) == "paper"):
        return None
    own = [one for one in paper if (one.model, one.data, one.method) == (first.model, first.data, first.method)]
    protocol = config.get("protocol", "original")
    return min(own, key=lambda one: (one.protocol != protocol, apart(100 * row.flops, one.flops)), default=None)


def apart(one: float, other: float) -> float:
    """By what factor two costs differ, at least 1."""
    return math.exp(abs(math.log(max(one, 1e-9) / max(other, 1e-9))))

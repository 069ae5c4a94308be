"""What a row is compared with: the paper, rows that were trained alike, and how ours stand among them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimstart.lab.reports.rows import ITS_ESTIMATOR, SAME, Row, policy_of
from slimstart.lab.reports.tables import escaped

# The paper's estimator, and that of its authors' release; others are not what its rows are about.
ESTIMATORS = (ITS_ESTIMATOR, "vr_pge_symmetric")
# By how much the FLOPs of a uniform network may differ from those of a row that it stands beside.
NEAR = 1.05
# Settings that runs must share to be compared, beside network, data, batch size and epochs.
SHARED = ("precision", "width", "image_size", "validation")


@dataclass(frozen=True)
class Published:
    """A row of the paper: percent, and times. What it does not say is None."""

    model: str
    data: str
    method: str
    accuracy: float
    params: float | None
    flops: float
    saving: float | None
    epochs: tuple[int, int] | None = None  # of its recipe: without fine-tuning, and of that
    protocol: str = "original"


@dataclass(frozen=True, eq=False)
class Line:
    """A row, and what it is compared with: a row of the paper, and rows that were trained alike."""

    row: Row
    paper: Published | None
    alike: Sequence[Row]

    @property
    def uniform(self) -> Row | None:
        """The uniform network of about as many FLOPs: of those that have as many, the best."""
        near = [one for one in self.near(NEAR) if _is_uniform(one)] if _is_found(self.row) else []
        return min(near, key=lambda one: (max(SAME, apart(one.flops, self.row.flops)), -one.accuracy), default=None)

    @property
    def paper_epochs(self) -> tuple[int, int] | None:
        return None if self.paper is None else self.paper.epochs

    @property
    def is_short(self) -> bool:
        """Whether it had fewer epochs than the paper's recipe has."""
        return self.paper_epochs is not None and self.row.first.epochs < sum(self.paper_epochs)

    def near(self, factor: float) -> list[Row]:
        """Rows that were trained alike, and whose FLOPs differ by at most this factor."""
        return [one for one in self.alike if apart(one.flops, self.row.flops) <= factor]


def lines_of(rows: Sequence[Row], published: Sequence[Published], defaults: Mapping[str, Any]) -> list[Line]:
    """The rows of one table, with what they are compared with; `defaults` are those of settings."""
    shared = {row: _shared(row, defaults) for row in rows}
    alike = {row: [one for one in rows if one is not row and shared[one] == shared[row]] for row in rows}
    return [Line(row, _paper_of(row, published), alike[row]) for row in rows]


def _paper_of(row: Row, published: Iterable[Published]) -> Published | None:
    """The paper's row about this method and network, of the same protocol if there is one, the nearest in FLOPs."""
    first, config = row.first, row.first.config
    if config.get("width", 1) != 1 or config.get("validation", 0):  # another network, or other images to test on
        return None
    if first.method == "slimstart" and not (_is_of(row, ESTIMATORS) and policy_of(first) == "paper"):
        return None
    own = [one for one in published if (one.model, one.data, one.method) == (first.model, first.data, first.method)]
    protocol = config.get("protocol", "original")
    return min(own, key=lambda one: (one.protocol != protocol, apart(100 * row.flops, one.flops)), default=None)


def _shared(row: Row, defaults: Mapping[str, Any]) -> tuple[object, ...]:
    """What rows must have in common to be compared."""
    run, settings = row.first, {**defaults, **row.first.config}
    return (run.model, run.data, run.batch_size, run.epochs, *map(settings.get, SHARED))


def _is_found(row: Row) -> bool:
    """Whether its widths are others than those of the dense network, or one share of them."""
    return row.first.method != "dense" and not _is_uniform(row)


def _is_uniform(row: Row) -> bool:
    """Whether it is the uniform network: one number for all widths, and no profile."""
    return row.first.method == "uniform" and row.first.config.get("protocol") != "front_heavy"


def _is_of(row: Row, estimators: Container[str]) -> bool:
    return row.first.method == "slimstart" and (row.first.config.get("estimator") or ITS_ESTIMATOR) in estimators


def apart(one: float, other: float) -> float:
    """By what factor two costs differ, at least 1."""
    return math.exp(abs(math.log(max(one, 1e-9) / max(other, 1e-9))))


def standings(lines: Sequence[Line], ours: Container[str]) -> Iterator[str]:
    """Under each budget, how the best of ours stands at equal FLOPs against uniform and the best of the others.

    Args:
        ours: estimators with which slimstart trains a narrow network, and not the dense one.
    """
    own = [line for line in lines if _is_of(line.row, ours)]
    for budget in dict.fromkeys(line.row.first.budget for line in own):
        under = [line for line in own if line.row.first.budget == budget]
        rivals = {
            line: [one for one in line.near(SAME) if one.first.method != "dense" and not _is_of(one, ours)]
            for line in under
        }
        rivals = {line: found for line, found in rivals.items() if found} or rivals
        best = max(rivals, key=lambda line: line.row.accuracy)
        text = f"**{escaped(best.row.label)}**"
        if not rivals[best]:
            yield f"{text} has nothing beside it"
            continue
        if len(rivals) > 1:
            text += f", the best of {len(rivals)} of ours,"
        uniform = [row for row in rivals[best] if _is_uniform(row)]
        text += f" is {standing(best.row, uniform)} uniform" if uniform else " has no uniform network beside it"
        if others := [row for row in rivals[best] if _is_found(row)]:
            name = escaped(max(others, key=lambda row: row.accuracy).label)
            which = f"the best of {len(others)} others, {name}" if len(others) > 1 else f"the only other, {name}"
            yield f"{text} and is {standing(best.row, others)} {which}"
        else:
            yield f"{text} and has no other method beside it"


def standing(row: Row, others: Sequence[Row]) -> str:
    """Where a row is against the best of others, and whether seeds differ by more than that."""
    other = max(others, key=lambda one: one.accuracy)
    points = round(row.accuracy - other.accuracy, 2)
    spread = max(one.spread(lambda run: run.accuracy) or 0.0 for one in (row, other))
    noise = " (less than seeds differ)" if 0 < abs(points) < spread else ""
    order = "level with" if not points else "behind" if points < 0 else "ahead of"
    return order if not points else f"{abs(points):.2f} points{noise} {order}"

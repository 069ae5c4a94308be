"""The record of a study, written by `run_study.py`. It can be read without torch.

Losses are means over a training batch, in nats; variances are of gradients of s. `*_error` are standard errors. What
could not be known is None. docs/studies.md says how everything is measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from slimstart.lab import records

SCHEMA = "slimstart.study/1"


@dataclass(frozen=True)
class VarianceRow:
    """Variance of one estimator's gradient in one layer, over masks and batches."""

    layer: str | None  # None: all layers together
    estimator: str  # "vr_pge"; "pge_plain" is pge without the preconditioner
    num_units: int  # with s between 0 and 1; others are not counted
    num_rare: int  # of these, with s so near 0 or 1 that fewer than 10 of all masks were expected to tell of it
    variance: float  # mean over the units
    standard_error: float
    ratio: float | None  # to the variance of the first estimator; None where that is 0
    ratio_error: float | None


@dataclass(frozen=True)
class FlipRow:
    """E[L^2], V and V_max after an epoch of a search."""

    epoch: int
    num_units: int  # with s between 0 and 1
    num_tried: int  # of these, over which the maximum is taken
    squared_loss: float  # E[L(m)^2]
    squared_loss_error: float
    dispersion: float  # V: E (L(m) - L(m'))^2
    dispersion_error: float
    max_dispersion: float  # V_max: one unit held at 0 or 1; chosen on one half of the batches, measured on the other
    max_dispersion_error: float
    max_dispersion_naive: float  # chosen and measured on the same batches, which is too much
    excess: float  # V_max - V, from the same masks; may come out negative
    excess_error: float


@dataclass(frozen=True)
class Study:
    """One study: facts about the code and the machine, and rows of one of the two kinds."""

    command: str
    commit: str | None
    version: str
    device: str
    hardware: str
    torch: str
    python: str
    started: str  # ISO 8601, UTC
    finished: str
    config: dict[str, Any]  # of the run
    settings: dict[str, Any]  # of the study
    epoch: int  # whole epochs that the run had trained at the end
    variance: tuple[VarianceRow, ...] = ()
    flip: tuple[FlipRow, ...] = ()
    schema: str = SCHEMA

    @property
    def network(self) -> str:
        return f"{self.config.get('model')} on {self.config.get('data')}"


write = records.write


def read(path: str | os.PathLike[str]) -> Study:
    """Read a record: a JSON file, or the folder of a study."""
    return records.read_as(Study, path, SCHEMA, "a study")

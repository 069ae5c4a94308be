"""The record of `run_paper_steps.py`.

Conventions are those of `slimstart.lab.records`: times in milliseconds per training step, ratios as fractions of the
dense network, one multiply-add = 1 FLOP. What was not measured is None.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from slimstart.lab.records import read_plain, write_plain

SCHEMA = "slimstart.bench/1"

Engines = dict[str, float]
Spread = tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """The dense network, the narrow one and slimstart, measured in turns, for one budget and state of the search."""

    model: str
    batch_size: int
    coupling: str
    precision: str
    budget: str  # "flops=0.1"
    structure: str  # "middle": s in the middle of a search
    decided: float  # share of s within 0.05 of 0 or 1
    resample_every: int
    flops_ratio: float  # of the narrow network: a sampled one, without padding
    executed_flops_ratio: float  # of slimstart, padding included; mean over draws
    dense_ms: float  # medians over turns
    narrow_ms: float
    ours_ms: float
    speedup: float  # dense_ms / ours_ms
    of_limit: float  # narrow_ms / ours_ms
    dense_spread_ms: Spread  # 10th and 90th percentile over turns
    narrow_spread_ms: Spread
    ours_spread_ms: Spread
    ours_mean_ms: float  # rare events, such as a change of shapes, count here and not in the median
    dense_forward_ms: float  # the median, divided as in eager steps with a synchronisation after each part
    dense_backward_ms: float
    narrow_forward_ms: float
    narrow_backward_ms: float
    ours_forward_ms: float  # all forwards of a step
    ours_backward_ms: float
    hand_narrow_ms: float | None  # of the uniform network of equal FLOPs; None if the narrow network has no ports
    peak_memory: int | None  # bytes, without dense weights and optimizer state; None on a CPU
    narrow_peak_memory: int | None
    dense_engine: str  # the fastest of `dense_engines`
    narrow_engine: str
    our_engine: str
    dense_engines: Engines
    narrow_engines: Engines
    num_turns: int  # of each network
    window: int  # steps of slimstart in a turn


@dataclass(frozen=True)
class Bench:
    """One benchmark: its rows, and the facts about the code and the machine."""

    command: str
    commit: str | None
    version: str
    device: str
    hardware: str
    torch: str
    python: str
    started: str  # ISO 8601, UTC
    finished: str
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    schema: str = SCHEMA


def write(bench: Bench, path: str | os.PathLike[str]) -> None:
    """Write a record as JSON, atomically; `read` is the inverse."""
    write_plain(bench, path)


def read(path: str | os.PathLike[str]) -> Bench:
    """Read a record: a JSON file, or the folder of a benchmark.

    Raises:
        RecordError: there is none, or it is not of this schema; the message says which field.
    """
    return read_plain(Bench, path, SCHEMA, "a benchmark")

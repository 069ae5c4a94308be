"""The record of `run_paper_steps.py`. It can be read without torch.

Conventions are those of `slimstart.lab.records`: times in milliseconds per training step, ratios as fractions of the
dense network, one multiply-add = 1 FLOP. What was not measured is None. Numbers out of range, and ratios that
contradict the times, are refused when a record is made or read. docs/records.md describes every field.
"""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slimstart.errors import RecordError
from slimstart.lab.records import read_plain, write_plain

SCHEMA = "slimstart.bench/1"
STRUCTURES = ("start", "middle")

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
    structure: str  # s at the "start" of a search, or in the "middle" of one
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

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise RecordError(f"the field {problem}")


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


def _problems(row: Row) -> Iterator[str]:
    for name, value in _numbers(row):
        low = 0 if name in ("decided", "peak_memory", "narrow_peak_memory") else 1e-9
        if not (isinstance(value, int | float) and low <= value <= 1e30):  # so written, NaN fails too
            yield f"`{name}` is {reprlib.repr(value)}; it must be from {low:g} to 1e30"
    if row.structure not in STRUCTURES:
        yield f"`structure` is {reprlib.repr(row.structure)}; it must be one of {', '.join(STRUCTURES)}"
    for name in ("dense", "narrow", "ours"):
        spread, median = getattr(row, f"{name}_spread_ms"), getattr(row, f"{name}_ms")
        if len(spread) != 2 or not spread[0] <= (1 + 1e-9) * median <= (1 + 2e-9) * spread[1]:
            yield f"`{name}_spread_ms` is {reprlib.repr(spread)}; it must be two times around `{name}_ms`, {median:g}"
    for name, time in (("speedup", row.dense_ms), ("of_limit", row.narrow_ms)):
        if not math.isclose(getattr(row, name), time / row.ours_ms, rel_tol=1e-6):
            yield f"`{name}` is {getattr(row, name):g}; by the times of the row it must be {time / row.ours_ms:g}"
    for name in ("dense", "narrow"):
        engine, engines = getattr(row, f"{name}_engine"), getattr(row, f"{name}_engines")
        if engine not in engines or engines[engine] != getattr(row, f"{name}_ms"):
            yield f"`{name}_engine` is {reprlib.repr(engine)}; it must be that one of `{name}_engines` with `{name}_ms`"


def _numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """The fields that must hold numbers, with each of their values."""
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        yield from ((field.name, one) for one in several if one is not None and not isinstance(value, str))

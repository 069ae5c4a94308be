"""Records to rows: one row for the runs that differ in the seed alone, one definition of what a table shows of it."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimstart import records
from slimstart.errors import RecordError
from slimstart.records import Record

MISSING = "–"
Value = Callable[[Record], float | None]


@dataclass(frozen=True, eq=False)
class Row:
    """Runs of one setting, by seed; `note` says what sets it apart from rows of the same method and budget."""

    runs: tuple[Record, ...]
    note: str = ""

    @property
    def first(self) -> Record:
        return self.runs[0]

    @property
    def network(self) -> str:
        return f"{self.first.model} on {self.first.data}"

    @property
    def method(self) -> str:
        return f"{self.first.method} ({self.note})" if self.note else self.first.method

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.method, self.first.budget)))

    def values(self, value: Value) -> list[float]:
        """Of the runs that have it."""
        return [one for run in self.runs if (one := value(run)) is not None]

    def mean(self, value: Value) -> float | None:
        found = self.values(value)
        return statistics.fmean(found) if found else None

    def spread(self, value: Value) -> float | None:
        """Sample standard deviation; None for a single run."""
        found = self.values(value)
        return statistics.stdev(found) if len(found) > 1 else None


def find(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """Read records: of files, of runs' folders, and of all runs and record files up to two folders below a folder.

    Raises:
        RecordError: a file is not a sound record, or there is none. JSON files below a folder that do not claim to be
            records of runs are passed over.
    """
    places = [Path(path) for path in paths]
    # By resolved name: a run that is given twice, or linked, counts once.
    files = {file.resolve(): file for place in places for file in _files(place)}
    if not files:
        where = ", ".join(map(str, places)) or "an empty list"
        raise RecordError(
            f"`paths`: no record in {where}; give folders of finished runs, or the files of their records"
        )
    return [records.read(file) for file in files.values()]


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir() or (path / "record.json").is_file():
        yield path / "record.json" if path.is_dir() else path
        return
    candidates = {file for pattern in ("*.json", "*/*.json", "*/*/record.json") for file in path.glob(pattern)}
    # A run's own file must be sound; other files may be anything, and a benchmark's file is called like a run's.
    ours = {records.SCHEMA.partition("/")[0]: candidates, "": {f for f in candidates if f.name == "record.json"}}
    yield from (file for file in sorted(candidates) if file in ours.get(_family(file), ()))


def _family(file: Path) -> str:
    """What kind of record a file claims to be, "" if none."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {error}") from error
    return str(content.get("schema", "")).partition("/")[0] if isinstance(content, dict) else ""


def summarise(runs: Iterable[Record]) -> list[Row]:
    """Join runs that differ in the seed alone; by network, dense first, then from many FLOPs to few."""
    same: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
    for run in runs:
        same[_setting(run)].append(run)
    rows = [Row(tuple(sorted(group, key=lambda run: (run.seed, run.started)))) for group in same.values()]
    return sorted(_told_apart(rows), key=_order)


def _setting(run: Record) -> tuple[object, ...]:
    what = (run.model, run.data, run.method, run.budget or "", run.epochs, run.config_hash)
    return (*what, run.device, run.hardware)


def _order(row: Row) -> tuple[object, ...]:
    first = row.first
    return (first.model, first.data, first.method != "dense", -(row.mean(_flops) or 0), first.method, _setting(first))


def _told_apart(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows of equal names get the rest of their setting as a note, as far as it differs."""
    namesakes: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        namesakes[row.network, row.label].append(row)
    for group in namesakes.values():
        firsts = [row.first for row in group]
        notes = [(f"{run.epochs} epochs", run.hardware, run.device, f"config {run.config_hash[:6]}") for run in firsts]
        differs = [len(set(parts)) > 1 for parts in zip(*notes, strict=True)]
        for row, note in zip(group, notes, strict=True):
            yield Row(row.runs, ", ".join(itertools.compress(note, differs)))


def by_network(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each model and data set: what may stand in one table."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.network].append(row)
    return dict(found)


@dataclass(frozen=True)
class Column:
    """One column of a table: its heading, the cell of a row as plain text, and what the numbers mean."""

    title: str
    cell: Callable[[Row], str]
    meaning: str
    numeric: bool = True


def number(value: float | None, unit: str = "") -> str:
    """Three digits that count, or two decimals: 0.07, 9.39, 12.5, 1,234."""
    if value is None:
        return MISSING
    if value >= 1e7:
        return f"{value:.3g}{unit}"
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{unit}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    size, unit = time_unit(seconds)
    return number(seconds / size, f" {unit}")


def time_unit(seconds: float) -> tuple[int, str]:
    """The unit to show a time in, with its length in seconds."""
    return (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")


def _flops(run: Record) -> float:
    return 100 * run.flops_ratio


def _speed(reference: Value) -> Value:
    """How many times faster than a reference one step is; above 1 is faster."""

    def speed(run: Record) -> float | None:
        other = reference(run)
        return None if run.step_ms is None or other is None else other / run.step_ms

    return speed


def _accuracy(row: Row) -> str:
    spread = row.spread(lambda run: run.accuracy)
    return f"{row.mean(lambda run: run.accuracy):.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def _seeds(row: Row) -> str:
    seeds = len({run.seed for run in row.runs})
    return f"{seeds}" if seeds == len(row.runs) else f"{seeds} ({len(row.runs)} runs)"


def _step(row: Row) -> str:
    parts = [number(row.mean(lambda run: run.step_forward_ms)), number(row.mean(lambda run: run.step_backward_ms))]
    total = number(row.mean(lambda run: run.step_ms))
    return total if parts == [MISSING, MISSING] else f"{total} ({' / '.join(parts)})"


def _of(value: Value, show: Callable[[float | None], str] = number) -> Callable[[Row], str]:
    return lambda row: show(row.mean(value))


def _times(value: float | None) -> str:
    return number(value, "×")


COLUMNS = (
    Column(
        "method",
        lambda row: row.method,
        "How the network was trained; in brackets, what sets rows of one name apart.",
        numeric=False,
    ),
    Column(
        "budget",
        lambda row: row.first.budget or MISSING,
        "The limit on the structure, as a fraction of dense.",
        numeric=False,
    ),
    Column("seeds", _seeds, "Runs that differ in the seed alone; the other columns show their mean."),
    Column(
        "accuracy, %",
        _accuracy,
        "On the test images, of the finished network; ± is the sample standard deviation over the seeds.",
    ),
    Column("FLOPs, %", _of(_flops), "Multiply-adds of one forward of the finished network, of dense."),
    Column("params, %", _of(lambda run: 100 * run.params_ratio), "Parameters of the finished network, of dense."),
    Column(
        "cost saving, formula",
        _of(lambda run: run.train_cost_saving, _times),
        "The paper's 3 f_D / (4 f_S). f_D: FLOPs of a dense forward; f_S: of a sampled one, mean over the search.",
    ),
    Column(
        "cost saving, executed",
        _of(lambda run: run.executed_saving, _times),
        "FLOPs of dense training on the same images, divided by all that this training executed.",
    ),
    Column("step, ms", _step, "One training step; in brackets, its forwards and its backward."),
    Column(
        "step against dense",
        _of(_speed(lambda run: run.dense_step_ms), _times),
        "Step time of the dense network on the same machine, divided by this one: above 1 is faster.",
    ),
    Column(
        "step against narrow",
        _of(_speed(lambda run: run.narrow_step_ms), _times),
        "The same for a hand-narrowed network of as many FLOPs: what is missing to 1 is the price of the search.",
    ),
    Column("training time", _of(lambda run: run.train_seconds, duration), "On the clock, without evaluation."),
    Column(
        "peak memory",
        _of(lambda run: run.peak_memory_bytes or None, lambda size: number(size and size / 2**20, " MiB")),
        "Of the training: allocated on the GPU, or, on a CPU, held by the process.",
    ),
)

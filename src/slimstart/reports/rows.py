"""Records to rows: which runs are found, which differ in the seed alone, and what tells the others apart."""

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
from slimstart.records import Layer, Record

Value = Callable[[Record], float | None]
# Further away from its budget than this, a network cannot be compared with others under that budget.
LEAST_OF_BUDGET, MOST_OF_BUDGET = 0.9, 1.01
# Settings by which runs of one method compete with each other.
VARIANTS = ("estimator", "protocol")


def _filters(layers: Iterable[Layer]) -> float | None:
    found = list(layers)
    return sum(layer.width for layer in found) / sum(layer.dense for layer in found) if found else None


def _all_filters(run: Record) -> float | None:
    return _filters(run.layers)


def _cut_filters(run: Record) -> float | None:
    return _filters(layer for layer in run.layers if layer.width < layer.dense)


# What a finished network takes of what a budget limits, at least and at most: a record does not say which of the layers
# that are whole count as channels, and which never could be cut, as the last one.
TAKEN: dict[str, tuple[Value, Value]] = {
    "flops": (lambda run: run.flops_ratio, lambda run: run.flops_ratio),
    "params": (lambda run: run.params_ratio, lambda run: run.params_ratio),
    "channels": (_cut_filters, _all_filters),
}


@dataclass(frozen=True, eq=False)
class Row:
    """Runs of one setting, by seed; `note` says what sets its method apart from others of that name."""

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

    @property
    def missed(self) -> float | None:
        """What the finished networks take of what the budget limits, where that is not what was asked for."""
        kind, _, text = (self.first.budget or "").partition("=")
        try:
            limit, (least, most) = float(text), TAKEN[kind.strip()]
        except (ValueError, LookupError):  # no budget, or a record of somebody else's
            return None
        low, high = self.mean(least), self.mean(most)
        if low is not None and low > MOST_OF_BUDGET * limit:
            return low
        return high if high is not None and high < LEAST_OF_BUDGET * limit else None

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
    """Join runs that differ in the seed alone; by network, dense first, then by budget, from many FLOPs to few."""
    same: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
    for run in runs:
        same[_setting(run)].append(run)
    rows = [Row(tuple(sorted(group, key=lambda run: (run.seed, run.started)))) for group in same.values()]
    under: defaultdict[tuple[str, str | None], list[float]] = defaultdict(list)
    for row in rows:
        under[row.network, row.first.budget].append(_flops(row))

    def order(row: Row) -> tuple[object, ...]:
        first, budget = row.first, under[row.network, row.first.budget]
        place = (first.model, first.data, first.method != "dense", -statistics.fmean(sorted(budget)))
        return (*place, first.budget or "", -_flops(row), first.method, _setting(first))

    return sorted(_told_apart(rows), key=order)


def _flops(row: Row) -> float:
    return row.mean(lambda run: run.flops_ratio) or 0.0


def _setting(run: Record) -> tuple[object, ...]:
    what = (run.model, run.data, run.method, run.budget or "", run.epochs, run.config_hash)
    return (*what, run.device, run.hardware)


def _told_apart(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows of equal names get the rest of their setting as a note, as far as it differs.

    What is noted of one row is noted of all of its method: under other budgets, too, it is the same contender.
    """
    methods: defaultdict[tuple[str, str], defaultdict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        methods[row.network, row.method][row.label].append(row)
    for namesakes in methods.values():
        noted = {name for group in namesakes.values() for name in _differences([row.first for row in group])}
        for row in itertools.chain(*namesakes.values()):
            facts = _facts(row.first)
            yield Row(row.runs, ", ".join(text for name, text in facts.items() if name in noted))


def _differences(runs: Sequence[Record]) -> list[str]:
    """Names of facts that tell these runs apart: variant and surroundings always, more of the settings if need be."""
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(itertools.chain(*facts)))
    chosen: list[str] = []
    for name in names:
        apart = len({tuple(one.get(n) for n in chosen) for one in facts}) == len(runs)
        if len({one.get(name) for one in facts}) > 1 and (name in _ALWAYS or not apart):
            chosen.append(name)
    return chosen


_ALWAYS = (*VARIANTS, "epochs", "hardware", "device")


def _facts(run: Record) -> dict[str, str]:
    """What may tell a run from others of its method and budget, as text, the telling ones first."""
    first = {name: str(run.config[name]) for name in VARIANTS if name in run.config}
    first |= {"epochs": f"{run.epochs} epochs", "hardware": run.hardware, "device": run.device}
    rest = {name: f"{name} {value}" for name, value in run.config.items() if name not in {*first, "seed"}}
    return first | rest | {"config_hash": f"config {run.config_hash[:6]}"}


def by_network(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each model and data set: what may stand in one table."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.network].append(row)
    return dict(found)

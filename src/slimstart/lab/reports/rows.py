"""Rows of tables and figures: joins runs that differ only in the seed, and gives rows distinct labels."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimstart.errors import RecordError
from slimstart.io.files import read_bytes
from slimstart.lab import records
from slimstart.lab.records import Record

Value = Callable[[Record], float | None]
# What differs by less than this factor is the same; a network further above its budget has missed it.
SAME = 1.02
# Settings that have a column of their own, or none.
NAMED = ("model", "data", "method", "budget", "seed", "finetune_epochs")
# Settings that only the paper's policy has, and its default estimator, which is not mentioned.
OF_THE_PAPER, ITS_ESTIMATOR = ("estimator", "sampling", "structure_lr", "num_masks"), "vr_pge"


def _cut_filters(run: Record) -> float | None:
    """Kept filters of the layers that were cut: at least what a budget of channels counts.

    A record does not say which of the other layers count as channels, and which never could be cut, as the last one.
    """
    cut = [layer for layer in run.layers if layer.width < layer.dense]
    return sum(layer.width for layer in cut) / sum(layer.dense for layer in cut) if cut else None


# What a finished network takes of what a budget limits.
TAKEN: dict[str, Value] = {
    "flops": lambda run: run.flops_ratio,
    "params": lambda run: run.params_ratio,
    "channels": _cut_filters,
}


@dataclass(frozen=True, eq=False)
class Row:
    """Runs of one setting, by seed.

    Attributes:
        note: the settings that differ from those of other rows of the same method.
        name: shown in place of the method and the note.
    """

    runs: tuple[Record, ...]
    note: str = ""
    name: str = ""

    @property
    def first(self) -> Record:
        return self.runs[0]

    @property
    def network(self) -> str:
        return f"{self.first.model} on {self.first.data}"

    @property
    def method(self) -> str:
        return self.name or (f"{self.first.method} ({self.note})" if self.note else self.first.method)

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.method, self.first.budget)))

    @property
    def accuracy(self) -> float:
        return statistics.fmean(run.accuracy for run in self.runs)

    @property
    def flops(self) -> float:
        """Of the finished networks, as a fraction of dense."""
        return statistics.fmean(run.flops_ratio for run in self.runs)

    @property
    def epochs(self) -> str:
        """Of training, or search, plus those of fine-tuning: "53 + 7"."""
        said = self.first.config.get("finetune_epochs")
        finetuning = said if isinstance(said, int) else 0  # the settings of a record may be anything
        return " + ".join(str(count) for count in (self.first.epochs - finetuning, finetuning) if count)

    @property
    def missed(self) -> dict[str, float]:
        """What the finished networks take of what a budget limits, where that is more than the budget; by its kind."""
        found = {}
        for kind, text in records.budget_parts(self.first.budget or ""):
            try:
                limit, taken = float(text), self.mean(TAKEN[kind])
            except (ValueError, LookupError):  # no budget, or one that is not known here
                continue
            if taken is not None and taken > SAME * limit:
                found[kind] = taken
        return found

    def values(self, value: Value) -> list[float]:
        """The values of the runs that have one."""
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
    # Files of runs must be valid; other JSON files are skipped. A benchmark's record has the file name of a run's.
    ours = {records.SCHEMA.partition("/")[0]: candidates, "": {f for f in candidates if f.name == "record.json"}}
    yield from (file for file in sorted(candidates) if file in ours.get(family(file), ()))


def family(file: Path) -> str:
    """The kind of record by the schema that a file names; "" if none."""
    try:
        content = json.loads(read_bytes(file, records.MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {error}") from error
    return str(content.get("schema", "")).partition("/")[0] if isinstance(content, dict) else ""


def summarise(runs: Iterable[Record]) -> list[Row]:
    """Join runs that differ only in the seed.

    Rows are sorted by network; dense first, then by budget from many FLOPs to few, then from the best to the worst.
    """
    same: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
    for run in runs:
        same[_setting(run)].append(run)
    rows = [Row(tuple(sorted(group, key=lambda run: (run.seed, run.started)))) for group in same.values()]
    under: defaultdict[tuple[str, str | None], list[float]] = defaultdict(list)
    for row in rows:
        under[row.network, row.first.budget].append(row.flops)

    def order(row: Row) -> tuple[object, ...]:
        first, budget = row.first, under[row.network, row.first.budget]
        place = (first.model, first.data, first.method != "dense", -statistics.fmean(sorted(budget)))
        return (*place, first.budget or "", -row.accuracy, first.method, _setting(first))

    return sorted(_told_apart(rows), key=order)


def _setting(run: Record) -> tuple[object, ...]:
    what = (run.model, run.data, run.method, run.budget or "", run.epochs, run.config_hash)
    return (*what, run.device, run.hardware)


def _told_apart(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows with notes: the settings in which they differ from other rows of their method."""
    methods: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        methods[row.network, row.first.method].append(row)
    for namesakes in methods.values():
        facts = [_facts(row) for row in namesakes]
        noted = {name for one in facts for name in one if len({other.get(name) for other in facts}) > 1}
        notes = [", ".join(text for name, text in one.items() if name in noted) for one in facts]
        named = [replace(row, note=note) for row, note in zip(namesakes, notes, strict=True)]
        taken = Counter(row.label for row in named)
        for row in named:  # a record may lack the setting that makes its hash different
            extra = f"config {row.first.config_hash}" if taken[row.label] > 1 else ""
            yield replace(row, note=", ".join(filter(None, (row.note, extra))))


def _facts(row: Row) -> dict[str, str]:
    """The settings that may distinguish a row from others of its method, as text."""
    run = row.first
    settings = run.config | {"epochs": row.epochs, "hardware": run.hardware, "device": run.device}
    if run.method == "slimstart":
        settings["policy"] = policy_of(run)
        if settings["policy"] != "paper":
            settings = {name: value for name, value in settings.items() if name not in OF_THE_PAPER}
        elif settings.get("estimator") == ITS_ESTIMATOR:
            del settings["estimator"]
    else:
        settings = {name: value for name, value in settings.items() if name not in ("policy", "estimator", "sampling")}
    return {name: f"{name} {value}" for name, value in settings.items() if name not in NAMED and value is not None}


def policy_of(run: Record) -> str:
    """The policy of a slimstart run; the oldest records do not say, because there was only one."""
    return str(run.config.get("policy", "paper"))


def by_network(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each model and data set: those of one table."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.network].append(row)
    return dict(found)

"""All records under results/, read once.

An experiment is a folder of runs that are compared with each other. Its files `LABEL-seed0.json`, `LABEL-seed1.json`,
... (or `LABEL.json`) are the runs of one row. `results/archive` has experiments that the main tables do not show. A
`README.md` in a folder says what was run; its first paragraph is shown in the list of experiments.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study import records as study_records
from study.records import Study

from slimstart.lab import records
from slimstart.lab.records import Record
from slimstart.lab.reports.rows import Row

ARCHIVE = "archive"
STRUCTURES, HELD_OUT = "structures.jsonl", "held_out.jsonl"
_LABEL = re.compile(r"(.+?)(-seed\d+(-again)?)?")
_READERS = {module.SCHEMA.partition("/")[0]: module.read for module in (records, study_records)}


@dataclass(frozen=True)
class Experiment:
    """The rows of one folder, by label; `text` is its README."""

    name: str  # the folder below results/
    rows: Mapping[str, Row]
    text: str = ""

    @property
    def is_archived(self) -> bool:
        return self.name.startswith(f"{ARCHIVE}/")

    @property
    def page(self) -> str:
        """The file name of its page, below docs/results/."""
        return f"{self.name}.md"


@dataclass(frozen=True)
class Results:
    """What is under results/: by folder, or by path below it."""

    experiments: Mapping[str, Experiment]
    studies: Mapping[str, Study]
    benchmarks: Mapping[str, Mapping[str, Any]]  # of scripts in benchmarks/
    texts: Mapping[str, str]  # README.md of all folders
    structures: Sequence[Mapping[str, Any]] = ()  # of the table of structures, a run each
    held_out: Sequence[Mapping[str, Any]] = ()  # of `held_out.py`, a run each

    def row(self, experiment: str, label: str) -> Row | None:
        found = self.experiments.get(experiment)
        return None if found is None else found.rows.get(label)


def read(folder: Path) -> Results:
    """Read all records.

    Raises:
        RecordError: a file claims a schema of ours and does not follow it.
    """
    runs: defaultdict[str, defaultdict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    studies, benchmarks = {}, {}
    for file in sorted(folder.rglob("*.json")):
        place = file.relative_to(folder)
        content = json.loads(file.read_text(encoding="utf-8"))
        schema = str(content.get("schema", "")).partition("/")[0] if isinstance(content, dict) else ""
        if schema not in _READERS:
            benchmarks[place.as_posix()] = _with_new_names(content)
            continue
        record = _READERS[schema](file)
        if isinstance(record, Record):
            match = _LABEL.fullmatch(file.stem)
            assert match is not None  # `.+?` takes everything
            runs[place.parent.as_posix()][match[1]].append(record)
        else:
            studies[place.as_posix()] = record
    texts = {
        file.parent.relative_to(folder).as_posix(): file.read_text(encoding="utf-8")
        for file in folder.rglob("README.md")
    }
    experiments = {
        name: Experiment(name, {label: _row(label, own) for label, own in found.items()}, texts.get(name, ""))
        for name, found in sorted(runs.items())
    }
    return Results(experiments, studies, benchmarks, texts, _lines(folder / STRUCTURES), _lines(folder / HELD_OUT))


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _row(label: str, runs: list[Record]) -> Row:
    return Row(tuple(sorted(runs, key=lambda run: (run.seed, run.started))), name=label)


def _with_new_names(content: Any) -> Any:
    """A benchmark's record with the method `narrow`, in the names of variants, called `uniform` as it is now."""
    if not isinstance(content, dict) or "texts" not in content:
        return content

    def renamed(variant: str) -> str:
        return re.sub(r"^narrow\b", "uniform", variant)

    texts = {renamed(variant): text for variant, text in content["texts"].items()}
    return content | {
        "texts": texts,
        "rows": [row | {"variant": renamed(row["variant"])} for row in content["rows"]],
    }

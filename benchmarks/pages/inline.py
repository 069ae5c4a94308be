"""Single numbers of sentences, by name.

    PLACE/LABEL FIELD [- [PLACE/]LABEL] [.DIGITS]

`vgg19-cifar10-10/slimstart accuracy` is the mean over the seeds, `vgg19-cifar10-10/slimstart accuracy - uniform .1` by
how much it is above that of `uniform`, with one digit after the point. Places are folders of results/ with runs; fields
are those of `FIELDS`. Two more places have fields of their own:

- `ablation:MODEL:BUDGET`, such as `ablation:vgg19:flops=0.1/equal_worth accuracy - uniform`: variants of `ablation.py`
  and `profiles.py`, on validation images;
- `depthwise`, with the labels `all`, `least` and `most` and the field `ratio`: time of our kernels divided by cuDNN's.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable

from pages.markers import MarkerError
from pages.stored import Results
from slimstart.lab.records import Record
from slimstart.lab.reports.rows import Row


def _mean(value: Callable[[Record], float | None]) -> Callable[[Row], float | None]:
    return lambda row: row.mean(value)


FIELDS: dict[str, tuple[Callable[[Row], float | None], int]] = {  # with the digits after the point
    "accuracy": (_mean(lambda run: run.accuracy), 2),  # percent
    "flops": (_mean(lambda run: 100 * run.flops_ratio), 1),  # percent of dense
    "params": (_mean(lambda run: 100 * run.params_ratio), 1),
    "seconds": (_mean(lambda run: run.train_seconds), 1),  # of training
    "building": (_mean(lambda run: run.building_seconds), 1),  # seconds of it for graph capture and rebuilding
    "first-epoch": (_mean(lambda run: run.history[0].seconds), 1),
    "executed-saving": (_mean(lambda run: run.executed_saving), 2),
    "seeds": (lambda row: len({run.seed for run in row.runs}), 0),
}
_NAME = re.compile(r"(?P<path>\S+/\S+) (?P<field>\S+)( - (?P<other>\S+))?( \.(?P<digits>\d))?")
DEPTHWISE = "depthwise_h200.json"


def number(name: str, results: Results) -> str:
    """The number of a name, as text.

    Raises:
        MarkerError: there is no such number.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise MarkerError(f"{name!r} is no number: write PLACE/LABEL FIELD, with a FIELD of {', '.join(FIELDS)}")

    def value(place: str, label: str) -> float:
        found = _value(results, place, label, match["field"])
        if found is None:
            raise MarkerError(f"{name!r}: results/ has no {match['field']} of {place}/{label}")
        return found

    place, label = _split(match["path"])
    difference = value(place, label)
    if other := match["other"]:
        difference -= value(*_split(other)) if "/" in other else value(place, other)
    digits = int(match["digits"] or FIELDS.get(match["field"], (None, 2))[1])
    text = f"{difference:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")  # no −0.00


def _split(path: str) -> tuple[str, str]:
    """A place and a label; labels of profiles may have slashes, and so may folders."""
    place, _, label = path.partition("/") if path.startswith("ablation:") else path.rpartition("/")
    return place, label


def _value(results: Results, place: str, label: str, field: str) -> float | None:
    if place.startswith("ablation:") and field == "accuracy":
        _, model, budget = place.split(":")
        for kind in ("ablation", "profiles"):
            found = [
                row["accuracy"]
                for record in results.benchmarks.values()
                if record.get("benchmark") == kind and record["model"] == model
                for row in record["rows"]
                if (row["variant"], row["budget"]) == (label, budget) and "accuracy" in row
            ]
            if found:
                return statistics.mean(found)
    if place == "depthwise" and field == "ratio":
        rows = results.benchmarks[DEPTHWISE]["rows"]
        ratios = [row["ours_ms"] / row["torch_ms"] for row in rows]
        whole = sum(row["ours_ms"] for row in rows) / sum(row["torch_ms"] for row in rows)
        return {"all": whole, "least": min(ratios), "most": max(ratios)}.get(label)
    row = results.row(place, label)
    return FIELDS[field][0](row) if row is not None and field in FIELDS else None

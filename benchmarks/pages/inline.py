"""Single numbers of sentences, by name.

    EXPERIMENT/LABEL FIELD [- LABEL] [.DIGITS]

`vgg19-cifar10-10/slimstart accuracy` is the mean over the seeds, `vgg19-cifar10-10/slimstart accuracy - uniform .1` by
how much it is above that of `uniform`, with one digit after the point. Fields: see `FIELDS`.
"""

from __future__ import annotations

import re
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
_NAME = re.compile(r"(?P<place>\S+)/(?P<label>\S+) (?P<field>\S+)( - (?P<other>\S+))?( \.(?P<digits>\d))?")


def number(name: str, results: Results) -> str:
    """The number of a name, as text.

    Raises:
        MarkerError: there is no such number.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["field"] not in FIELDS:
        raise MarkerError(f"{name!r} is no number: write EXPERIMENT/LABEL FIELD, with a FIELD of {', '.join(FIELDS)}")

    def value(label: str) -> float:
        row = results.row(match["place"], label)
        found = None if row is None else FIELDS[match["field"]][0](row)
        if found is None:
            raise MarkerError(f"{name!r}: no record in results/{match['place']}/{label}*.json has this number")
        return found

    difference = value(match["label"]) - (value(match["other"]) if match["other"] else 0.0)
    digits = int(match["digits"] or FIELDS[match["field"]][1])
    text = f"{difference:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")  # no −0.00

"""What runs reached beside what the paper reports, and what studies found: one page of Markdown, from records alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slimstart.records import Record
from slimstart.reports import study_tables
from slimstart.reports.rows import Row, by_network, summarise
from slimstart.reports.tables import COLUMNS, MISSING, escaped, markdown_table, number
from slimstart.study_records import Study

# The paper's estimator, and that of its authors' release; others are not what its rows are about.
ESTIMATORS = ("vr_pge", "vr_pge_symmetric")
# FLOPs that differ by less than this factor are the same; by more than the other, a comparison says nothing.
SAME, NEAR = 1.02, 1.5

INTRODUCTION = """\
# Results

Made by `make results` from the records under [results](../results); a test holds it to them. Accuracy is on the test
images, ± is the sample standard deviation over seeds.

- **narrow**: the network narrowed by hand to about as many FLOPs and trained for as many epochs; in brackets, by how
  much the row is better than it.
- **paper**: what the paper reports of this method on this network; **difference**: ours minus that, in points. Where
  FLOPs are not the same, the difference is due to them too: both are in the table.
- **saving, formula**: train cost by the formulas of the paper's appendix; **executed**: all that was computed, against
  dense training on the same images ([records.md](records.md#what-training-costs)).
- **epochs**: of training, or search, plus those of fine-tuning; the paper's are those of its recipe, where known.
"""


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


@dataclass(frozen=True)
class Experiment:
    """Runs that were made to be compared with each other, and where their records are, as a link."""

    link: str
    runs: Sequence[Record]


@dataclass(frozen=True)
class Line:
    """A row, and what it is compared with."""

    row: Row
    paper: Published | None
    narrow: Row | None

    @property
    def accuracy(self) -> float:
        return _accuracy(self.row)

    @property
    def paper_epochs(self) -> tuple[int, int] | None:
        return None if self.paper is None else self.paper.epochs

    @property
    def is_short(self) -> bool:
        """Whether it had fewer epochs than the paper's recipe has."""
        return self.paper_epochs is not None and self.row.first.epochs < sum(self.paper_epochs)


def page(
    experiments: Iterable[Experiment],
    studies: Mapping[str, Study],
    benches: Sequence[str],
    published: Sequence[Published],
) -> str:
    """The page, the same for the same records in any order.

    Args:
        studies: by the link to their figure.
        benches: links to records of step times.
        published: all rows of the paper that there are.
    """
    tables: defaultdict[str, list[str]] = defaultdict(list)
    for experiment in sorted(experiments, key=lambda one: one.link):
        for network, rows in by_network(summarise(experiment.runs)).items():
            tables[network] += ["", *_experiment(experiment.link, rows, published)]
    lines = [INTRODUCTION.rstrip()]
    for network in sorted(tables):
        lines += ["", f"## {escaped(network)}", *tables[network]]
    for title, kind in (("Variance of the structure gradient", "variance"), ("V and V max", "flip")):
        if found := {link: study for link, study in sorted(studies.items()) if getattr(study, kind)}:
            lines += ["", f"## {title}", "", "[studies.md](studies.md) says how they are measured."]
            for link, study in found.items():
                lines += ["", *_study(link, study)]
    if benches:
        links = ", ".join(f"[{link.removeprefix('../')}]({link})" for link in sorted(benches))
        lines += ["", "## Step times", "", f"In [performance.md](performance.md), from {links}."]
    return "\n".join(lines) + "\n"


def _experiment(link: str, rows: Sequence[Row], published: Sequence[Published]) -> Iterator[str]:
    lines = [Line(row, _paper_of(row, published), _narrow_of(row, rows)) for row in rows]
    precisions = sorted({str(row.first.config.get("precision", "float32")) for row in rows})
    yield f"Records: [{link.removeprefix('../')}]({link}), in {' and '.join(precisions)}."
    if any(line.is_short for line in lines):
        yield "**Fewer epochs than the paper's recipes:** compare the rows with each other first."
    columns = [[title, *map(cell, lines)] for title, cell in CELLS]
    filled = [column for column in columns if set(column[1:]) != {MISSING}]
    yield ""
    yield from markdown_table(list(zip(*filled, strict=True)), ("method", "budget", "hardware"))
    if verdicts := [_verdict(line, line.paper) for line in lines if line.paper is not None]:
        yield from ("", *verdicts)


def _paper_of(row: Row, published: Iterable[Published]) -> Published | None:
    """The paper's row about this method and network, of the same protocol if there is one, the nearest in FLOPs."""
    first, config = row.first, row.first.config
    if config.get("width", 1) != 1 or config.get("validation", 0):  # another network, or other images to test on
        return None
    if first.method == "slimstart" and config.get("estimator", ESTIMATORS[0]) not in ESTIMATORS:
        return None
    own = [one for one in published if (one.model, one.data, one.method) == (first.model, first.data, first.method)]
    protocol = config.get("protocol", "original")
    return min(own, key=lambda one: (one.protocol != protocol, _apart(_flops(row), one.flops)), default=None)


def _narrow_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """The hand-narrowed network of about as many FLOPs and the same epochs."""
    if row.first.method in ("dense", "narrow"):
        return None
    others = [one for one in rows if one.first.method == "narrow" and one.first.epochs == row.first.epochs]
    near = min(others, key=lambda one: _apart(_flops(row), _flops(one)), default=None)
    return near if near is not None and _apart(_flops(row), _flops(near)) <= NEAR else None


def _apart(one: float, other: float) -> float:
    """By what factor two costs differ, at least 1."""
    return math.exp(abs(math.log(max(one, 1e-9) / max(other, 1e-9))))


def _accuracy(row: Row) -> float:
    return row.mean(lambda run: run.accuracy) or 0.0


def _flops(row: Row) -> float:
    return 100 * (row.mean(lambda run: run.flops_ratio) or 0.0)


def _points(difference: float) -> str:
    return f"{difference:+.2f}".replace("-", "−")


def _epochs_of(run: Record) -> str:
    finetuning = int(run.config.get("finetune_epochs", 0))
    return _sum((run.epochs - finetuning, finetuning))


def _sum(epochs: tuple[int, int]) -> str:
    return " + ".join(map(str, filter(None, epochs)))


# --- cells -----------------------------------------------------------------------------------------------------------


def _own(title: str) -> Callable[[Line], str]:
    """A column of all tables of rows."""
    (column,) = (column for column in COLUMNS if column.title == title)
    return lambda line: column.cell(line.row)


def _beside(title: str, paper: Callable[[Published], float | None], unit: str = "") -> Callable[[Line], str]:
    """The same, with the paper's number in brackets."""

    def cell(line: Line) -> str:
        theirs = None if line.paper is None or line.row.first.method == "dense" else paper(line.paper)
        return _own(title)(line) + ("" if theirs is None else f" (paper: {theirs:g}{unit})")

    return cell


def _narrow_cell(line: Line) -> str:
    if line.narrow is None:
        return MISSING
    better = _points(line.accuracy - _accuracy(line.narrow))
    return f"{_accuracy(line.narrow):.2f} ({better}{_at(line)})"


def _at(line: Line) -> str:
    """The FLOPs of the hand-narrowed network, where they are not the row's."""
    flops = 0.0 if line.narrow is None else _flops(line.narrow)
    return "" if _apart(flops, _flops(line.row)) <= SAME else f" at {number(flops)} % FLOPs"


def _epochs_cell(line: Line) -> str:
    own, theirs = _epochs_of(line.row.first), line.paper_epochs
    return own if theirs is None or _sum(theirs) == own else f"{own}; the paper: {_sum(theirs)}"


CELLS: tuple[tuple[str, Callable[[Line], str]], ...] = (
    ("method", _own("method")),
    ("budget", _own("budget")),
    ("accuracy, %", _own("accuracy, %")),
    ("narrow, %", _narrow_cell),
    ("paper, %", lambda line: MISSING if line.paper is None else f"{line.paper.accuracy:g}"),
    ("difference", lambda line: MISSING if line.paper is None else _points(line.accuracy - line.paper.accuracy)),
    ("FLOPs, %", _beside("FLOPs, %", lambda paper: paper.flops)),
    ("params, %", _beside("params, %", lambda paper: paper.params)),
    ("saving, formula", _beside("cost saving, formula", lambda paper: paper.saving, "×")),
    ("saving, executed", _own("cost saving, executed")),
    ("epochs", _epochs_cell),
    ("seeds", _own("seeds")),
    ("training time", _own("training time")),
    ("hardware", lambda line: line.row.first.hardware),
)


# --- sentences -------------------------------------------------------------------------------------------------------


def _verdict(line: Line, paper: Published) -> str:
    """Whether a row is where the paper is, and what may be the reason if not."""
    points = line.accuracy - paper.accuracy
    where = "falls short of" if points < 0 else "is above"
    text = f"- **{escaped(line.row.label)}** {where} the paper by {abs(points):.2f} points: "
    text += f"{line.accuracy:.2f} % against {paper.accuracy:g} %"
    if _apart(_flops(line.row), paper.flops) > SAME:
        text += f", at {number(_flops(line.row))} % of the FLOPs against {paper.flops:g} %"
    if paper.epochs is not None and line.is_short:
        text += f", after {_epochs_of(line.row.first)} epochs; the paper: {_sum(paper.epochs)}"
    if line.narrow is not None:
        ahead = line.accuracy - _accuracy(line.narrow)
        order = "behind" if ahead < 0 else "ahead of"
        text += f". It is {abs(ahead):.2f} points {order} the hand-narrowed network{_at(line)}"
    return text + "."


def _study(link: str, study: Study) -> Iterator[str]:
    where = f"{study.network}, {study.epoch} epochs, {study.hardware}"
    yield " ".join(f"{escaped(sentence)}." for sentence in (where, *study_tables.findings(study)))
    yield from ("", f"![{escaped(study.network)}]({link})", "")
    yield from markdown_table(study_tables.cells(study), ("layer",))

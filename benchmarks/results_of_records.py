"""What runs reached beside what the paper reports, and what studies found: one page of Markdown, from records alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results_rivals import ESTIMATORS, Line, Published, apart, lines_of, standing, standings
from study import tables as study_tables
from study.records import Study

from slimstart.lab.records import Record
from slimstart.lab.reports.rows import NONE, SAME, Row, by_network, summarise
from slimstart.lab.reports.tables import COLUMNS, MISSING, escaped, markdown_table, number

INTRODUCTION = """\
# Results

Made by `make results` from the records under [results](../results); a test holds it to them. Accuracy is on the test
images, ± is the sample standard deviation over seeds. Dense comes first, then budget by budget from the best to the
worst; brackets behind a method have those of its settings that differ in the table and are not the defaults.

- **budget**: missed is one that the finished network exceeds by more than 2 %.
- **uniform**: the network with one share of all widths, of as many FLOPs (at most 5 % more or less), trained for as
  many epochs; in brackets, by how much the row is better than it.
- **paper**: what the paper reports of this method on this network; **difference**: ours minus that, in points. Where
  FLOPs are not the same, the difference is due to them too: both are in the table.
- **saving, formula**: train cost by the formulas of the paper's appendix; **executed**: all that was computed, against
  dense training on the same images ([records.md](records.md#what-training-costs)).
- **epochs**: of training, or search, plus those of fine-tuning; the paper's are those of its recipe, where known.
"""


@dataclass(frozen=True)
class Experiment:
    """Runs that were made to be compared with each other, where their records are, as a link, and what to know."""

    link: str
    runs: Sequence[Record]
    text: str = ""  # Markdown, by whoever ran them


def page(
    experiments: Iterable[Experiment],
    studies: Mapping[str, Study],
    benches: Sequence[str],
    published: Sequence[Published],
    defaults: Mapping[str, Any] = NONE,
    ours: Container[str] = ESTIMATORS,
) -> str:
    """The page, the same for the same records in any order.

    Args:
        studies: by the link to their figure.
        benches: links to records of step times.
        published: all rows of the paper that there are.
        defaults: of a recipe.
        ours: estimators of our method, see `rivals.standings`.
    """
    tables: defaultdict[str, list[str]] = defaultdict(list)
    for experiment in sorted(experiments, key=lambda one: one.link):
        for network, rows in by_network(summarise(experiment.runs, defaults)).items():
            lines = lines_of(rows, published, defaults)
            tables[network] += ["", *_experiment(experiment, lines, ours)]
    text = [INTRODUCTION.rstrip()]
    for network in sorted(tables):
        text += ["", f"## {escaped(network)}", *tables[network]]
    for title, kind in (("Variance of the structure gradient", "variance"), ("V and V max", "flip")):
        if found := {link: study for link, study in sorted(studies.items()) if getattr(study, kind)}:
            text += ["", f"## {title}", "", "[studies.md](studies.md) says how they are measured."]
            for link, study in found.items():
                text += ["", *_study(link, study)]
    if benches:
        links = ", ".join(f"[{link.removeprefix('../')}]({link})" for link in sorted(benches))
        text += ["", "## Step times", "", f"In [performance.md](performance.md), from {links}."]
    return "\n".join(text) + "\n"


def _experiment(experiment: Experiment, lines: Sequence[Line], ours: Container[str]) -> Iterator[str]:
    where = experiment.link.removeprefix("../")
    yield f"### {escaped(where.rpartition('/')[2])}"
    if text := experiment.text.strip():
        text = re.sub(r"^(?=#+ )", "###", text, flags=re.MULTILINE)  # its headings are below ours
        yield from (
            "",
            re.sub(r"\]\((?!\w+:|[#/])", f"]({experiment.link}/", text),
        )  # and its links start in its folder
    precisions = sorted({str(line.row.first.config.get("precision", "float32")) for line in lines})
    yield from ("", f"Records: [{where}]({experiment.link}), in {' and '.join(precisions)}.")
    if any(line.is_short for line in lines):
        yield "**Fewer epochs than the paper's recipes:** compare the rows with each other first."
    if found := list(standings(lines, ours)):
        yield from ("", f"At equal FLOPs, within 2 %: {'; '.join(found)}.")
    columns = [[title, *map(cell, lines)] for title, cell in CELLS]
    filled = [column for column in columns if set(column[1:]) != {MISSING}]
    yield ""
    yield from markdown_table(list(zip(*filled, strict=True)), ("method", "budget", "hardware"))
    if verdicts := [_verdict(line, line.paper) for line in lines if line.paper is not None]:
        yield from ("", *verdicts)


def _points(difference: float) -> str:
    return f"{round(difference, 2) + 0.0:+.2f}".replace("-", "−")  # + 0.0: there is no −0.00


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


def _uniform_cell(line: Line) -> str:
    if line.uniform is None:
        return MISSING
    better = _points(line.row.accuracy - line.uniform.accuracy)
    return f"{line.uniform.accuracy:.2f} ({better}{_at(line.row, line.uniform)})"


def _at(row: Row, uniform: Row) -> str:
    """The FLOPs of the uniform network, where they are not the row's."""
    return "" if apart(uniform.flops, row.flops) <= SAME else f" at {number(100 * uniform.flops)} % FLOPs"


def _epochs_cell(line: Line) -> str:
    own, theirs = line.row.epochs, line.paper_epochs
    return own if theirs is None or _sum(theirs) == own else f"{own}; the paper: {_sum(theirs)}"


CELLS: tuple[tuple[str, Callable[[Line], str]], ...] = (
    ("method", _own("method")),
    ("budget", _own("budget")),
    ("accuracy, %", _own("accuracy, %")),
    ("uniform, %", _uniform_cell),
    ("paper, %", lambda line: MISSING if line.paper is None else f"{line.paper.accuracy:g}"),
    ("difference", lambda line: MISSING if line.paper is None else _points(line.row.accuracy - line.paper.accuracy)),
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
    row, points = line.row, line.row.accuracy - paper.accuracy
    where = "falls short of" if points < 0 else "is above"
    text = f"- **{escaped(row.label)}** {where} the paper by {abs(points):.2f} points: "
    text += f"{row.accuracy:.2f} % against {paper.accuracy:g} %"
    if apart(100 * row.flops, paper.flops) > SAME:
        text += f", at {number(100 * row.flops)} % of the FLOPs against {paper.flops:g} %"
    if paper.epochs is not None and line.is_short:
        text += f", after {row.epochs} epochs; the paper: {_sum(paper.epochs)}"
    if line.uniform is not None:
        text += f". It is {standing(row, [line.uniform])} the uniform network{_at(row, line.uniform)}"
    return text + "."


def _study(link: str, study: Study) -> Iterator[str]:
    where = f"{study.network}, {study.epoch} epochs, {study.hardware}"
    yield " ".join(f"{escaped(sentence)}." for sentence in (where, *study_tables.findings(study)))
    yield from ("", f"![{escaped(study.network)}]({link})", "")
    yield from markdown_table(study_tables.cells(study), ("layer",))

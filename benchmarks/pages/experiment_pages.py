"""docs/results/NAME.md, a page for each experiment, from its records and its README; a table of the paper's rows."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator

from pages.compared import Line, Published, apart, lines_of, published
from pages.naming import data_title, model_title
from pages.stored import Experiment, Results
from slimstart.lab.reports.rows import SAME, by_network
from slimstart.lab.reports.tables import COLUMNS, MISSING, escaped, markdown_table, number

GENERATED = "<!-- Written by `make results` from records; do not edit. -->"
BACK = "[What the columns mean](../results.md#columns). [All experiments](../results.md#all-experiments)."
_LINK = re.compile(r"\]\((?!\w+:|[#/])([^)]*)")  # relative, to the folder of the records
SHORT = "These runs had fewer epochs than the paper's: compare the rows with each other first."


def page(experiment: Experiment, paper: list[Published]) -> str:
    """The page of an experiment."""
    return "\n".join([GENERATED, "", *_section(experiment, paper, "#"), "", BACK]) + "\n"


def archive(experiments: Iterable[Experiment], paper: list[Published]) -> str:
    """One page for all archived experiments."""
    lines = [GENERATED, "", "# Archive", "", "Former versions, and measurements that were repeated since."]
    for experiment in experiments:
        lines += ["", *_section(experiment, paper, "##")]
    return "\n".join([*lines, "", BACK]) + "\n"


def _section(experiment: Experiment, paper: list[Published], heading: str) -> Iterator[str]:
    """What was run, where the records are, a table for each network."""
    up = f"../../results/{experiment.name}"
    yield f"{heading} {escaped(experiment.name.rpartition('/')[2])}"
    if text := experiment.text.strip():
        yield from ("", _LINK.sub(lambda link: f"]({posixpath.normpath(f'{up}/{link[1]}')}", text))
    for rows in by_network(experiment.rows.values()).values():
        yield from ("", *_network(experiment, lines_of(rows, paper), up))


def _network(experiment: Experiment, lines: list[Line], up: str) -> Iterator[str]:
    first = lines[0].row.first
    facts = [f"{model_title(first.model)} on {data_title(first.data)}. Records: [results/{experiment.name}]({up})"]
    budgets = {_own("budget")(line) for line in lines} - {MISSING}
    facts += [f"budget {escaped(*budgets)}"] if len(budgets) == 1 else []
    facts += [_listed(str(line.row.first.config.get("precision", "float32")) for line in lines)]
    facts += [_listed(line.row.first.hardware for line in lines)]
    yield f"{', '.join(facts)}. {SHORT if any(line.is_short for line in lines) else ''}".rstrip()
    columns = [[title, *map(cell, lines)] for title, cell in CELLS]
    filled = [
        column
        for column in columns
        if set(column[1:]) != {MISSING} and not (column[0] == "budget" and len(budgets) == 1)
    ]
    yield ""
    yield from markdown_table(list(zip(*filled, strict=True)), ("run", "budget"))


def _listed(texts: Iterator[str]) -> str:
    return escaped(" and ".join(sorted(set(texts))))


def _points(difference: float) -> str:
    return f"{round(difference, 2) + 0.0:+.2f}".replace("-", "−")  # + 0.0: there is no −0.00


def _sum(epochs: tuple[int, int]) -> str:
    return " + ".join(map(str, filter(None, epochs)))


def _own(title: str) -> Callable[[Line], str]:
    """A column that tables of a report have, too."""
    (column,) = (column for column in COLUMNS if column.title == title)
    return lambda line: column.cell(line.row)


def _with_paper(title: str, paper: Callable[[Published], float | None], unit: str = "") -> Callable[[Line], str]:
    """The same, with the paper's number in brackets."""

    def cell(line: Line) -> str:
        theirs = None if line.paper is None or line.row.first.method == "dense" else paper(line.paper)
        return _own(title)(line) + ("" if theirs is None else f" (paper: {theirs:g}{unit})")

    return cell


def _uniform_cell(line: Line) -> str:
    if line.uniform is None:
        return MISSING
    difference, other = _points(line.row.accuracy - line.uniform.accuracy), line.uniform.flops
    return difference + ("" if apart(other, line.row.flops) <= SAME else f" (at {number(100 * other)} % FLOPs)")


def _epochs_cell(line: Line) -> str:
    own, theirs = line.row.epochs, None if line.paper is None else line.paper.epochs
    return own if theirs is None or _sum(theirs) == own else f"{own} (paper: {_sum(theirs)})"


CELLS: tuple[tuple[str, Callable[[Line], str]], ...] = (
    ("run", _own("method")),
    ("budget", _own("budget")),
    ("accuracy, %", _own("accuracy, %")),
    ("against uniform", _uniform_cell),
    ("paper, %", lambda line: MISSING if line.paper is None else f"{line.paper.accuracy:g}"),
    ("against paper", lambda line: MISSING if line.paper is None else _points(line.row.accuracy - line.paper.accuracy)),
    ("FLOPs, %", _with_paper("FLOPs, %", lambda paper: paper.flops)),
    ("params, %", _with_paper("params, %", lambda paper: paper.params)),
    ("saving, formula", _with_paper("cost saving, formula", lambda paper: paper.saving, "×")),
    ("saving, executed", _own("cost saving, executed")),
    ("epochs", _epochs_cell),
    ("seeds", _own("seeds")),
    ("training time", _own("training time")),
)
SHOWN = (
    *("accuracy, %", "against uniform", "paper, %", "against paper", "FLOPs, %", "saving, formula", "saving, executed"),
    *("epochs", "seeds"),
)


def paper_rows(results: Results) -> str:
    """A row for each method and network that the paper reports, if it was trained for as long as its recipe says."""
    cells = [cell for title, cell in CELLS if title in SHOWN]
    head = ["network", "method", *(title for title, _ in CELLS if title in SHOWN)]
    lines = [head, ["---", "---", *["---:"] * len(cells)]]
    for experiment in results.experiments.values():
        for network, line in _of_full_length(experiment):
            lines.append([network, escaped(line.row.first.method), *(escaped(cell(line)) for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of_full_length(experiment: Experiment) -> Iterator[tuple[str, Line]]:
    if experiment.is_archived:
        return
    for rows in by_network(experiment.rows.values()).values():
        for line in lines_of(rows, published()):
            if line.paper is not None and line.paper.epochs is not None and not line.is_short:
                first = line.row.first
                title = f"{model_title(first.model)}, {data_title(first.data)}"
                yield f"[{escaped(title)}](results/{experiment.page})", line

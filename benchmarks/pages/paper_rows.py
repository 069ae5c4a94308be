"""The paper, row by row: what it reports, and our trainings of full length."""

from __future__ import annotations

from collections.abc import Iterator

from pages.compared import Line, lines_of, published
from pages.experiment_pages import CELLS
from pages.naming import data_title, model_title
from pages.stored import Experiment, Results
from slimstart.lab.reports.rows import by_network
from slimstart.lab.reports.tables import escaped

SHOWN = (
    *("accuracy, %", "against uniform", "paper, %", "against paper", "FLOPs, %", "saving, formula", "saving, executed"),
    *("epochs", "seeds"),
)


def table(results: Results) -> str:
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

"""Columns of tables, the same in a terminal, on the page and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from slimstart.lab.control_characters import visible
from slimstart.lab.records import Record
from slimstart.lab.reports.rows import Row, Value, by_network, summarise

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """One column of a table: its heading, the cell of a row as plain text, and an explanation.

    Columns that are not essential are left out where there is little space.
    """

    title: str
    cell: Callable[[Row], str]
    meaning: str
    numeric: bool = True
    essential: bool = True


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, at most two decimals: 0.07, 9.39, 12.5, 1,234."""
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


def _speed(reference: Value) -> Value:
    """Step time of a reference divided by that of the run; above 1 is faster."""

    def speed(run: Record) -> float | None:
        other = reference(run)
        return None if run.step_ms is None or other is None else other / run.step_ms

    return speed


def _accuracy(row: Row) -> str:
    spread = row.spread(lambda run: run.accuracy)
    return f"{row.accuracy:.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def _budget(row: Row) -> str:
    budget = row.first.budget or MISSING
    if not row.missed:
        return budget
    several = "+" in budget
    missed = (f"{kind}={taken:.3g}" if several else f"{taken:.3g}" for kind, taken in row.missed.items())
    return f"{budget} (missed: {', '.join(missed)})"


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
        "How the network was trained; in brackets, settings in which rows of one method differ.",
        numeric=False,
    ),
    Column(
        "budget",
        _budget,
        "The limit on the structure, as a fraction of dense. Missed: the finished network exceeds it by more than 2 %; "
        "what it takes is in brackets.",
        numeric=False,
    ),
    Column("seeds", _seeds, "Runs that differ only in the seed; the other columns show their mean."),
    Column(
        "accuracy, %",
        _accuracy,
        "On the test images, of the finished network; ± is the sample standard deviation over the seeds.",
    ),
    Column(
        "FLOPs, %",
        lambda row: number(100 * row.flops),
        "Multiply-adds of one forward of the finished network, of dense.",
    ),
    Column("params, %", _of(lambda run: 100 * run.params_ratio), "Parameters of the finished network, of dense."),
    Column(
        "cost saving, formula",
        _of(lambda run: run.train_cost_saving, _times),
        "By the formulas of the paper's appendix, over the epochs that they count: 3 f_D / (4 f_S) in a search, with "
        "f_D FLOPs of a dense forward and f_S of a sampled one; over all epochs where nothing is searched.",
    ),
    Column(
        "cost saving, executed",
        _of(lambda run: run.executed_saving, _times),
        "FLOPs of dense training on the same images, divided by all that this training executed.",
    ),
    Column("step, ms", _step, "One training step; in brackets, its forwards and its backward.", essential=False),
    Column(
        "step against dense",
        _of(_speed(lambda run: run.dense_step_ms), _times),
        "Step time of the dense network on the same machine, divided by that of the run: above 1 is faster.",
        essential=False,
    ),
    Column(
        "step against uniform",
        _of(_speed(lambda run: run.narrow_step_ms), _times),
        "The same for the uniform network of equal FLOPs: below 1 is the cost of the search.",
        essential=False,
    ),
    Column("training time", _of(lambda run: run.train_seconds, duration), "Wall-clock time, without evaluation."),
    Column(
        "peak memory",
        _of(lambda run: run.peak_memory_bytes or None, lambda size: number(size and size / 2**20, " MiB")),
        "Of the training: allocated on the GPU, or, on a CPU, held by the process.",
        essential=False,
    ),
)


def markdown(runs: Iterable[Record]) -> str:
    """The tables of all networks, without columns that are empty."""
    lines: list[str] = []
    for network, rows in by_network(summarise(runs)).items():
        cells = shown(rows)
        texts = [column.title for column in COLUMNS if not column.numeric]
        lines += [f"## {escaped(network)}", "", *markdown_table(cells, texts), ""]
    return "\n".join(lines)


def shown(rows: Sequence[Row], essential: bool = False) -> list[list[str]]:
    """Titles and cells of the rows, without empty columns; `essential` leaves out the others, too."""
    chosen = [column for column in COLUMNS if column.essential or not essential]
    columns = [[column.title, *(column.cell(row) for row in rows)] for column in chosen]
    return [list(line) for line in zip(*(one for one in columns if set(one[1:]) != {MISSING}), strict=True)]


def markdown_table(cells: Sequence[Sequence[str]], texts: Container[str]) -> list[str]:
    """Lines of a table from its titles and rows; columns that are not in `texts` are aligned to the right."""
    marks = ["---" if title in texts else "---:" for title in cells[0]]
    return [
        f"| {' | '.join(line)} |" for line in (map(escaped, cells[0]), marks, *(map(escaped, c) for c in cells[1:]))
    ]


def escaped(text: str) -> str:
    """Text with control characters, and the special ones of Markdown, escaped."""
    return re.sub(r"([\\|`*_<>\[\]$])", r"\\\1", visible(" ".join(text.split())))

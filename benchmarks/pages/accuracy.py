"""Accuracy at equal FLOPs: the tables of the README and of the results.

An experiment is in these tables if it has runs `uniform` and `slimstart`, with three seeds or more of each. Rows
`shallow` and `shallow-NAME` are networks with fewer layers; the best of them is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pages.naming import data_title, model_title
from pages.stored import Experiment, Results
from slimstart.lab.records import Record
from slimstart.lab.reports.rows import Row
from slimstart.lab.reports.tables import MISSING, markdown_table, number

FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Comparison:
    """Networks of one experiment with equal FLOPs."""

    experiment: Experiment
    uniform: Row
    slimstart: Row
    front_heavy: Row | None
    shallower: Row | None

    @property
    def title(self) -> str:
        return title_of(self.slimstart.first)

    def rows(self) -> Iterator[Row]:
        yield from (row for row in (self.uniform, self.front_heavy, self.shallower, self.slimstart) if row is not None)


def title_of(run: Record) -> str:
    """Network, data and budget of a run."""
    kind, _, share = (run.budget or "").partition("=")
    assert kind == "flops", f"{run.name} has another budget than FLOPs: {run.budget}"
    return f"{model_title(run.model)}, {data_title(run.data)}, {100 * float(share):g} %"


def comparisons(results: Results) -> list[Comparison]:
    """The experiments of the tables: by network, and from many FLOPs to few."""
    found = []
    for experiment in results.experiments.values():
        uniform, slimstart = (experiment.rows.get(label) for label in ("uniform", "slimstart"))
        if experiment.is_archived or uniform is None or slimstart is None:
            continue
        if min(len(uniform.runs), len(slimstart.runs)) < FEWEST_SEEDS:
            continue
        shallower = [row for label, row in experiment.rows.items() if label.split("-")[0] == "shallow"]
        best = max(shallower, key=lambda row: row.accuracy, default=None)
        found.append(Comparison(experiment, uniform, slimstart, experiment.rows.get("front-heavy"), best))
    networks = ["vgg19", "resnet32"]
    order = {name: i for i, name in enumerate(networks)}
    return sorted(
        found,
        key=lambda one: (
            order.get(one.slimstart.first.model, len(order)),
            one.slimstart.network,
            -one.slimstart.flops,
        ),
    )


def spread_cell(row: Row | None, digits: int) -> str:
    """Mean and standard deviation over seeds."""
    if row is None:
        return MISSING
    spread = row.spread(lambda run: run.accuracy)
    return f"{row.accuracy:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def seeds_cell(comparison: Comparison) -> str:
    counts = [len(row.runs) for row in comparison.rows()]
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def headline(results: Results) -> str:
    """The README's table."""
    found = comparisons(results)
    with_shallower = any(one.shallower for one in found)
    titles = ["network, FLOPs", "uniform", *["best shallower"] * with_shallower, "slimstart", "seeds"]
    lines = [titles]
    for one in found:
        seeds = sorted({len(row.runs) for row in one.rows() if row is not one.front_heavy})
        cells = [spread_cell(one.uniform, 1), *[spread_cell(one.shallower, 1)] * with_shallower]
        lines.append([one.title, *cells, spread_cell(one.slimstart, 1), " to ".join(map(str, seeds))])
    return "\n".join(markdown_table(lines, titles[:1]))


def depth(results: Results) -> str:
    """Experiments with a row `depth`: layers are removed by the rule, and widths are learned."""
    titles = ["network, FLOPs", "uniform", "widths learned", "layers removed, widths learned", "seeds"]
    lines = [titles]
    for experiment in results.experiments.values():
        found = [experiment.rows.get(label) for label in ("uniform", "widths", "depth")]
        if experiment.is_archived or any(row is None for row in found):
            continue
        rows = [row for row in found if row is not None]
        seeds = sorted({len(row.runs) for row in rows})
        lines.append([title_of(rows[0].first), *(spread_cell(row, 1) for row in rows), " to ".join(map(str, seeds))])
    return "\n".join(markdown_table(lines, titles[:1]))


def table(results: Results) -> str:
    """The first table of the results."""
    found = comparisons(results)
    with_shallower = any(one.shallower for one in found)
    titles = ["network, FLOPs", "uniform", "front-heavy", *["best shallower"] * with_shallower, "slimstart"]
    titles += ["slimstart − uniform", "FLOPs of slimstart, %", "seeds"]
    lines = [f"| {' | '.join(titles)} |", "| --- |" + " ---: |" * (len(titles) - 1)]
    for one in found:
        difference = one.slimstart.accuracy - one.uniform.accuracy
        cells = [f"[{one.title}](results/{one.experiment.page})", spread_cell(one.uniform, 2)]
        cells += [spread_cell(one.front_heavy, 2), *[spread_cell(one.shallower, 2)] * with_shallower]
        cells += [spread_cell(one.slimstart, 2), f"{difference:+.2f}".replace("-", "−")]
        cells += [number(100 * one.slimstart.flops), seeds_cell(one)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

"""Tables of benchmarks that compare variants: on the command line, and on pages of the results."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from slimstart.lab.reports.tables import MISSING

TEXTS = ("variant", "what is different")  # the columns that are no numbers


def cells(
    rows: list[dict[str, Any]], texts: dict[str, str], uniform: list[dict[str, Any]] | None = None
) -> Iterator[list[str]]:
    """Titles, and a line for each variant: means and spreads over seeds, by budget.

    Args:
        uniform: rows to compare with; by default those of the variant uniform.
    """
    uniform = [row for row in rows if row["variant"] == "uniform"] if uniform is None else uniform
    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    yield [*TEXTS, *budgets, "seeds"]
    found: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if "accuracy" in row:
            own = found[row["variant"], row["budget"]]
            if row["seed"] in own:
                raise ValueError(f"{row['variant']} at {row['budget']} has two rows of seed {row['seed']}")
            own[row["seed"]] = row["accuracy"]

    def cell(variant: str, budget: str) -> str:
        values = list(found[variant, budget].values())
        compared = [row["accuracy"] for row in uniform if row["budget"] == budget and "accuracy" in row]
        if not values:
            return MISSING
        mean = statistics.mean(values)
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        better = f" ({mean - statistics.mean(compared):+.2f})" if compared and variant != "uniform" else ""
        return f"{mean:.2f}{spread}{better.replace('-', '−')}"

    first = ("uniform", "equal_worth")
    for variant in sorted(dict.fromkeys(row["variant"] for row in rows), key=lambda name: name not in first):
        seeds = dict.fromkeys(str(len(found[variant, budget])) for budget in budgets if found[variant, budget])
        yield [variant, texts[variant], *(cell(variant, budget) for budget in budgets), ", ".join(seeds) or "0"]

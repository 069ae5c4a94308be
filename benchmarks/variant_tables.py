"""Tables of benchmarks that compare variants: on the command line, and as sections of the page of results."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slimstart.lab.reports.tables import MISSING, markdown_table

ABLATIONS = {  # benchmarks whose records have variants, and the titles of their sections
    "ablation": "What each ingredient of equal worth adds",
    "profiles": "Profiles by hand",
}


def sections(results: Path) -> str:
    """The sections of what each ingredient of equal worth adds, and of profiles by hand: records of two benchmarks."""
    read = {file: json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.rglob("*.json"))}
    of_kind = {
        kind: {file: record for file, record in read.items() if _benchmark(record) == kind} for kind in ABLATIONS
    }
    narrow = _tables(of_kind["ablation"].values())
    return "".join(_section(title, of_kind[kind], results, narrow) for kind, title in ABLATIONS.items())


def _benchmark(record: Any) -> str | None:
    return record.get("benchmark") if isinstance(record, dict) else None


def _tables(found: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows that belong into one table: of the same network, data, epochs and images."""
    tables: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in found:
        tables[tuple(record[name] for name in ("model", "data", "epochs", "validation"))] += record["rows"]
    return tables


def _section(
    title: str,
    found: dict[Path, dict[str, Any]],
    results: Path,
    compared: dict[tuple[Any, ...], list[dict[str, Any]]],
) -> str:
    """A table for each network, compared with the rows of narrow in others."""
    if not found:
        return ""
    texts: dict[str, str] = {}
    for record in found.values():
        texts |= record["texts"]
    paths = [file.relative_to(results).as_posix() for file in found]
    links = ", ".join(f"[{results.name}/{path}](../{results.name}/{path})" for path in paths)
    lines = ["", f"## {title}", "", f"Records: {links}."]
    for key, rows in sorted(_tables(found.values()).items()):
        model, data, epochs, validation = key
        narrow = [row for row in compared.get(key, []) if row["variant"] == "narrow"]
        images = f"{validation:,} training images that were left out for it" if validation else "the test images"
        lines += ["", f"### {model}, {data}, {epochs} epochs"]
        lines += ["", f"Accuracy on {images}; in brackets, against narrow."]
        lines += ["", *markdown_table(list(cells(rows, texts, narrow)), ("variant", "what is different"))]
    return "\n".join(lines) + "\n"


def cells(
    rows: list[dict[str, Any]], texts: dict[str, str], narrow: list[dict[str, Any]] | None = None
) -> Iterator[list[str]]:
    """Titles, and a line for each variant: means and spreads over seeds, by budget.

    Args:
        narrow: rows to compare with; by default those of the variant narrow.
    """
    narrow = [row for row in rows if row["variant"] == "narrow"] if narrow is None else narrow
    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    yield ["variant", "what is different", *budgets, "seeds"]
    found: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if "accuracy" in row:
            own = found[row["variant"], row["budget"]]
            if row["seed"] in own:
                raise ValueError(f"{row['variant']} at {row['budget']} has two rows of seed {row['seed']}")
            own[row["seed"]] = row["accuracy"]

    def cell(variant: str, budget: str) -> str:
        values = list(found[variant, budget].values())
        compared = [row["accuracy"] for row in narrow if row["budget"] == budget and "accuracy" in row]
        if not values:
            return MISSING
        mean = statistics.mean(values)
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        better = f" ({mean - statistics.mean(compared):+.2f})" if compared and variant != "narrow" else ""
        return f"{mean:.2f}{spread}{better.replace('-', '−')}"

    first = ("narrow", "equal_worth")
    for variant in sorted(dict.fromkeys(row["variant"] for row in rows), key=lambda name: name not in first):
        seeds = dict.fromkeys(str(len(found[variant, budget])) for budget in budgets if found[variant, budget])
        yield [variant, texts[variant], *(cell(variant, budget) for budget in budgets), ", ".join(seeds) or "0"]

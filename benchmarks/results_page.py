"""Write docs/results.md, and the figures of studies, from all records under results/. Run from the repository root.

python benchmarks/results_page.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from slimstart import atomic, bench_records, records, study_records
from slimstart.bench_records import Bench
from slimstart.recipes.paper import COMPARED
from slimstart.recipes.presets import PRESETS
from slimstart.recipes.recipe import Recipe
from slimstart.records import Record
from slimstart.reports import study_plot
from slimstart.reports.results import Experiment, page
from slimstart.reports.rivals import Published
from slimstart.reports.rows import family
from slimstart.reports.tables import MISSING, markdown_table
from slimstart.structure import ESTIMATORS
from slimstart.study_records import Study

ABLATIONS = {  # benchmarks whose records have variants, and the titles of their sections
    "ablation": "What each ingredient of equal worth adds",
    "profiles": "Profiles by hand",
}
ROOT = Path(__file__).resolve().parents[1]
KINDS: dict[str, Callable[[Path], Any]] = {
    module.SCHEMA.partition("/")[0]: module.read for module in (records, study_records, bench_records)
}


def found(folder: Path) -> Iterator[tuple[Path, Record | Study | Bench]]:
    """All records below a folder, with their files."""
    for file in sorted(folder.rglob("*.json")):
        if (kind := family(file)) in KINDS:
            yield file, KINDS[kind](file)


def published() -> list[Published]:
    """The rows of the paper: those of presets, with their epochs, and those of methods that have no preset."""
    rows = {key: Published(*key, p.accuracy, p.params, p.flops, p.train_cost_saving) for key, p in COMPARED.items()}
    repeated = []
    for recipe, paper in ((preset.recipe, preset.paper) for preset in PRESETS.values()):
        if paper is not None:
            key = (recipe.model, recipe.data, recipe.method)
            rows.pop(key, None)
            numbers = (paper.accuracy, paper.params, paper.flops, paper.train_cost_saving)
            epochs = (recipe.epochs, recipe.finetune_epochs)
            repeated.append(Published(*key, *numbers, epochs, recipe.protocol))
    return [*rows.values(), *repeated]


def make_page(results: Path) -> str:
    """The page, for a file in a folder beside that of the results. The README.md of a folder stands with its table."""
    runs: defaultdict[str, list[Record]] = defaultdict(list)
    studies, benches = {}, []
    for file, record in found(results):
        if isinstance(record, Record):
            runs[file.relative_to(results).parts[0]].append(record)
        elif isinstance(record, Study):
            studies[f"../{results.name}/{file.with_suffix('.svg').relative_to(results).as_posix()}"] = record
        else:
            benches.append(f"../{results.name}/{file.relative_to(results).as_posix()}")
    texts = {file.parent.name: file.read_text(encoding="utf-8") for file in results.glob("*/README.md")}
    experiments = [Experiment(f"../{results.name}/{name}", own, texts.get(name, "")) for name, own in runs.items()]
    defaults = {field.name: field.default for field in dataclasses.fields(Recipe)}
    return page(experiments, studies, benches, published(), defaults, ESTIMATORS) + ablations(results)


def ablations(results: Path) -> str:
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
        lines += ["", *markdown_table(list(ablation_cells(rows, texts, narrow)), ("variant", "what is different"))]
    return "\n".join(lines) + "\n"


def ablation_cells(
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for file, record in found(ROOT / "results"):
        if isinstance(record, Study):
            study_plot.write(record, file.with_suffix(".svg"))
    target = ROOT / "docs" / "results.md"
    atomic.write(target, make_page(ROOT / "results").encode())
    print(f"written: {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

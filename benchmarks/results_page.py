"""Write docs/results.md, and the figures of studies, from all records under results/. Run from the repository root.

python benchmarks/results_page.py
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import variant_tables
from results_of_records import Experiment, page
from results_rivals import Published
from study import plot as study_plot
from study import records as study_records
from study.records import Study

from slimstart.io import atomic
from slimstart.lab import records
from slimstart.lab.bench import bench_records
from slimstart.lab.bench.bench_records import Bench
from slimstart.lab.recipes.presets import PRESETS
from slimstart.lab.recipes.published import COMPARED
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.records import Record
from slimstart.lab.reports.rows import family
from slimstart.policies import ESTIMATORS

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
    return page(experiments, studies, benches, published(), defaults, ESTIMATORS) + variant_tables.sections(results)


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

"""Write docs/results.md, and the figures of studies, from all records under results/. Run from the repository root.

python benchmarks/results_page.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slimstart import atomic, bench_records, records, study_records
from slimstart.bench_records import Bench
from slimstart.recipes.paper import COMPARED
from slimstart.recipes.presets import PRESETS
from slimstart.records import Record
from slimstart.reports import study_plot
from slimstart.reports.results import Experiment, Published, page
from slimstart.study_records import Study

ROOT = Path(__file__).resolve().parents[1]
KINDS: dict[str, Callable[[Path], Any]] = {
    module.SCHEMA.partition("/")[0]: module.read for module in (records, study_records, bench_records)
}


def found(folder: Path) -> Iterator[tuple[Path, Record | Study | Bench]]:
    """All records below a folder, with their files."""
    for file in sorted(folder.rglob("*.json")):
        content = json.loads(file.read_bytes())
        kind = str(content.get("schema", "")).partition("/")[0] if isinstance(content, dict) else ""
        if kind in KINDS:
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
    """The page, for a file in a folder beside that of the results."""
    runs: defaultdict[str, list[Record]] = defaultdict(list)
    studies, benches = {}, []
    for file, record in found(results):
        if isinstance(record, Record):
            runs[f"../{results.name}/{file.relative_to(results).parts[0]}"].append(record)
        elif isinstance(record, Study):
            studies[f"../{results.name}/{file.with_suffix('.svg').relative_to(results).as_posix()}"] = record
        else:
            benches.append(f"../{results.name}/{file.relative_to(results).as_posix()}")
    return page([Experiment(*each) for each in runs.items()], studies, benches, published())


def main() -> None:
    for file, record in found(ROOT / "results"):
        if isinstance(record, Study):
            study_plot.write(record, file.with_suffix(".svg"))
    target = ROOT / "docs" / "results.md"
    atomic.write(target, make_page(ROOT / "results").encode())
    print(f"written: {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

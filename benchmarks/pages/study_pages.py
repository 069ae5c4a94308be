"""docs/results/studies.md, ablation.md and profiles.md: pages of measurements that are no comparison of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import ablation
import profiles
import variants as shared
from study import tables as study_tables

from pages.experiment_pages import GENERATED
from pages.naming import data_title, model_title
from pages.stored import Results
from slimstart.lab.reports.tables import escaped, markdown_table

BACK = "[All experiments](../results.md#all-experiments)."
TITLES = {"ablation": "Ablation of equal worth", "profiles": "Width profiles by hand"}
FORMER_VARIANTS = {
    "anew": "training starts again with new weights once widths are found",
    "finer": "multiples of 8 in the last round only, smaller steps for groups that would get fewer than two",
    "nearest": "widths are rounded to the nearest multiple of 8",
    "staying": "a width changes only if it differs from what is wanted by a step or more",
}
VARIANTS = {name: one.text for name, one in ablation.VARIANTS.items()} | FORMER_VARIANTS
PROFILES = {name: profile.text for name, profile in profiles.PROFILES.items()}
FOLDER = "ablation"  # of the records of both


def studies(results: Results) -> str:
    """The variance of the structure gradient, and the losses of sampled networks; figures are in the same folder."""
    lines = [GENERATED, "", "# Studies of the estimator", "", "[How they are measured](../studies.md)."]
    for title, kind in (("Variance of the structure gradient", "variance"), ("Losses of sampled networks", "flip")):
        for place, study in results.studies.items():
            if not getattr(study, kind):
                continue
            where = f"{study.network}, {study.epoch} epochs, {study.hardware}"
            sentences = " ".join(f"{escaped(one)}." for one in (where, *study_tables.findings(study)))
            lines += ["", f"## {title}", "", f"{sentences} [Record](../../results/{place})."]
            lines += ["", f"![{title}, {escaped(study.network)}]({figure_name(place)})"]
            lines += ["", *markdown_table(study_tables.cells(study), ("layer",))]
    return "\n".join([*lines, "", BACK]) + "\n"


def figure_name(place: str) -> str:
    """The file of a study's figure, from the place of its record."""
    return place.rpartition("/")[2].removesuffix(".json") + ".svg"


def variants(results: Results, kind: str) -> str:
    """The page of the benchmark `ablation` or `profiles`: a table for each network, compared with uniform."""
    found = {place: record for place, record in results.benchmarks.items() if record.get("benchmark") == kind}
    lines = [
        GENERATED,
        "",
        f"# {TITLES[kind]}",
        "",
        "[Widths](../widths.md) explains the variants and says what was learned from them.",
    ]
    if text := results.texts.get(FOLDER) if kind == FOLDER else None:
        lines += ["", text.strip()]
    folders = sorted({place.rpartition("/")[0] for place in found})
    lines += ["", f"Records: {', '.join(f'[results/{folder}](../../results/{folder})' for folder in folders)}."]
    texts = {
        name: _description(kind, name, text) for record in found.values() for name, text in record["texts"].items()
    }
    uniform = _tables(record for record in results.benchmarks.values() if record.get("benchmark") == "ablation")
    for key, rows in sorted(_tables(found.values()).items()):
        model, data, epochs, validation = key
        images = f"{validation:,} validation images, which training did not see" if validation else "the test images"
        lines += ["", f"## {model_title(model)}, {data_title(data)}, {epochs} epochs"]
        lines += ["", f"Accuracy on {images}, in percent; in brackets, the difference to uniform."]
        compared = [row for row in uniform.get(key, []) if row["variant"] == "uniform"]
        lines += ["", *markdown_table(list(shared.cells(rows, texts, compared)), shared.TEXTS)]
    return "\n".join([*lines, "", BACK]) + "\n"


def _description(kind: str, variant: str, recorded: str) -> str:
    """What a variant changes, as scripts describe it now; if they do not know it any more, as its record does."""
    known = {"profiles": PROFILES, "ablation": VARIANTS}[kind]
    parts = variant.split("+")
    return "; ".join(known[part] for part in parts) if known.keys() >= set(parts) else recorded


def _tables(found: Any) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows that belong into one table: of the same network, data, epochs and images."""
    tables: defaultdict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for record in found:
        tables[tuple(record[name] for name in ("model", "data", "epochs", "validation"))] += record["rows"]
    return tables

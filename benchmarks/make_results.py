"""Write everything that is generated from records under results/. Run from the repository root, or `make results`.

    python benchmarks/make_results.py

Generated are: what is between markers in README.md, CONTRIBUTING.md and the pages of docs/ (pages/markers.py shows how
markers look, pages/blocks.py lists the tables), the pages below docs/results/, and the figures below
docs/assets/results/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pages import blocks, experiment_pages, figures, markers, stored, study_pages, zoo_page
from pages.compared import published
from study import plot as study_plot

from slimstart.io import atomic

ROOT = Path(__file__).resolve().parents[1]


def documents(root: Path) -> list[Path]:
    """The files whose markers are filled: two in the root, and the pages of docs/ that are not generated as a whole."""
    pages = (file for file in (root / "docs").rglob("*.md") if file.parent != root / "docs" / "results")
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted(pages)]


def outputs(root: Path) -> dict[Path, str]:
    """All generated files with their content, from the records below `root`.

    Raises:
        MarkerError: a document has a marker without a partner or with an unknown name.
        RecordError: a record is not sound.
    """
    results = stored.read(root / "results")
    found: dict[Path, str] = {}
    for file in documents(root):
        try:
            text = file.read_text(encoding="utf-8")
            found[file] = markers.fill(text, lambda name: blocks.value(name, results))
        except markers.MarkerError as error:
            raise markers.MarkerError(f"{file.relative_to(root)}: {error}") from error
    pages, paper = root / "docs" / "results", published()
    for experiment in results.experiments.values():
        if not experiment.is_archived:
            found[pages / experiment.page] = experiment_pages.page(experiment, paper)
    archived = [one for one in results.experiments.values() if one.is_archived]
    if archived:
        found[pages / "archive.md"] = experiment_pages.archive(archived, paper)
    for kind in study_pages.TITLES:
        if any(record.get("benchmark") == kind for record in results.benchmarks.values()):
            found[pages / f"{kind}.md"] = study_pages.variants(results, kind)
    if zoo_page.PLACE in results.benchmarks:
        found[pages / "zoo.md"] = zoo_page.page(results)
    if results.studies:
        found[pages / "studies.md"] = study_pages.studies(results)
    for place, study in results.studies.items():
        found[pages / study_pages.figure_name(place)] = study_plot.draw(study)
    for theme in figures.THEMES:
        found[root / "docs" / "assets" / f"accuracy-{theme}.svg"] = figures.accuracies(results, theme)
        found[root / "docs" / "assets" / f"structures-{theme}.svg"] = figures.structures(results, theme)
    return found


def stale(root: Path, wanted: dict[Path, str]) -> list[Path]:
    """Generated files that no record leads to any more."""
    return [file for file in sorted((root / "docs" / "results").glob("*")) if file not in wanted]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    wanted = outputs(ROOT)
    for file, content in wanted.items():
        if not file.is_file() or file.read_text(encoding="utf-8") != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(file, content.encode())
            print(f"written: {file.relative_to(ROOT)}")
    for file in stale(ROOT, wanted):
        file.unlink()
        print(f"removed: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

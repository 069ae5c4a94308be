"""Tables of links to the pages of experiments."""

from __future__ import annotations

from pages import zoo_page
from pages.naming import data_title, model_title
from pages.stored import Experiment, Results
from pages.study_pages import TITLES
from slimstart.lab.reports.tables import escaped

HEAD = ["| experiment | network | runs | what it shows |", "| --- | --- | ---: | --- |"]


def experiments(results: Results) -> str:
    """One line for each experiment that is not archived, then the studies and the archive."""
    lines = [*HEAD, *(_line(one) for one in results.experiments.values() if not one.is_archived)]
    for kind, title in TITLES.items():
        rows = [record["rows"] for record in results.benchmarks.values() if record.get("benchmark") == kind]
        if rows:
            lines.append(f"| [{title}](results/{kind}.md) | several | {sum(map(len, rows))} | forms of the default |")
    if (zoo := results.benchmarks.get(zoo_page.PLACE)) is not None:
        shown = "what shrinks in models of torchvision, timm and transformers"
        lines.append(f"| [Models of other libraries](results/zoo.md) | {len(zoo['rows'])} models | | {shown} |")
    if results.studies:
        lines.append("| [Studies of the estimator](results/studies.md) | several | | variance of the gradient |")
    archived = [row for one in results.experiments.values() if one.is_archived for row in one.rows.values()]
    if archived:
        runs = sum(len(row.runs) for row in archived)
        lines.append(f"| [Archive](results/archive.md) | several | {runs} | former versions, repeated measurements |")
    return "\n".join(lines)


def _line(experiment: Experiment) -> str:
    firsts = [row.first for row in experiment.rows.values()]
    networks = sorted({f"{model_title(run.model)} on {data_title(run.data)}" for run in firsts})
    runs = sum(len(row.runs) for row in experiment.rows.values())
    name = experiment.name.rpartition("/")[2]
    about = " ".join(experiment.text.partition("\n\n")[0].split()).rstrip(".")  # the first paragraph
    return f"| [{escaped(name)}](results/{experiment.page}) | {', '.join(networks)} | {runs} | {about} |"

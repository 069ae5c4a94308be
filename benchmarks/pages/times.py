"""How long whole trainings take: runs that had the machine to themselves."""

from __future__ import annotations

from pages.naming import data_title, model_title
from pages.stored import Results
from slimstart.lab.reports.rows import Row
from slimstart.lab.reports.tables import markdown_table

TIMED = ("-time", "-time-first-run")  # ends of the names of such experiments
PAPER = "vgg19-cifar10-60"


def _seconds(row: Row) -> str:
    return f"{row.mean(lambda run: run.train_seconds):.1f}"


def trainings(results: Results) -> str:
    """A row for each experiment with runs `uniform` and `slimstart`."""
    lines = [["network, FLOPs", "epochs", "uniform, s", "slimstart, s", "of it rebuilding, s", "runs", "hardware"]]
    for experiment in sorted(results.experiments.values(), key=lambda one: one.name, reverse=True):
        if experiment.is_archived or not experiment.name.endswith(TIMED):
            continue
        uniform, slimstart = experiment.rows["uniform"], experiment.rows["slimstart"]
        first = slimstart.first
        title = f"{model_title(first.model)}, {data_title(first.data)}, {100 * slimstart.flops:.0f} %"
        title += ", first run on a machine" if experiment.name.endswith("first-run") else ""
        building = slimstart.mean(lambda run: run.building_seconds)
        cells = [title, str(first.epochs), _seconds(uniform), _seconds(slimstart), f"{building:.1f}"]
        lines.append([*cells, str(len(slimstart.runs)), first.hardware])
    return "\n".join(markdown_table(lines, ("network, FLOPs", "hardware")))


def paper(results: Results) -> str:
    """Accuracy, cost and time of the paper's algorithm, of the uniform network and of the dense one."""
    texts = {
        "dense": "dense",
        "uniform": "uniform",
        "paper-settled": "the paper's algorithm, structure fixed after half of the epochs",
        "paper": "the paper's algorithm",
    }
    rows = results.experiments[PAPER].rows
    lines = [["network", "accuracy, %", "FLOPs, %", "train cost saved", "step, ms", "training, s"]]
    for label, text in texts.items():
        run = rows[label].first
        cells = [f"{run.accuracy:.2f}", f"{100 * run.flops_ratio:.1f}", f"{run.executed_saving:.2f}×"]
        lines.append([text, *cells, f"{run.step_ms:.1f}", f"{run.train_seconds:.1f}"])
    return "\n".join(markdown_table(lines, lines[0][:1]))

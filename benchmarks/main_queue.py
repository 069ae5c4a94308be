"""Train the networks of the main tables at equal FLOPs, several processes in parallel; one record for each run.

    PYTHONPATH=src python benchmarks/main_queue.py --workers 12 --hours 0.15 --data-dir data --out runs/main

Each run is one `slimstart train`, with a folder below --out (`training_queue.py`). Every row has the default, the best
of the shallower networks and the uniform one. Which shallower network is best was read from the accuracy on held-out
images in the table of structures (`structures/`), before the first run of this list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from training_queue import Run, work_off


class Row(NamedTuple):
    """A row of the main tables, with the stages of the best shallower network."""

    model: str
    data: str
    percent: float
    shallow: str


ROWS = (
    Row("vgg19", "cifar10", 10, "2,2,2,2,2"),
    Row("vgg19", "cifar10", 1.8, "1,1,2,2,2"),
    Row("resnet32", "cifar10", 10, "1,2,3:late"),
    Row("vgg19", "cifar100", 10, "1,1,1,1,1"),
    Row("vgg19", "cifar100", 1.8, "1,1,1,1,1"),
    Row("resnet32", "cifar100", 10, "2,2,2:late"),
    Row("mobilenet_v1", "tiny_imagenet16", 25, "1,1,1,2,1"),
)
NAMES = {"tiny_imagenet16": "tiny"}  # of data sets in names of experiments
SEEDS = 3
LONG = 160  # epochs of the first row, trained for longer


def runs(row: Row, epochs: int, method: str) -> Iterator[Run]:
    """One method on a row."""
    percent = f"{row.percent:.0f}"
    experiment = f"{row.model}-{NAMES.get(row.data, row.data)}-{percent}" + f"-{epochs}" * (epochs != 40)
    settings: dict[str, str | float | int] = {
        "model": row.model,
        "data": row.data,
        "budget": f"flops={row.percent / 100:g}",
        "epochs": epochs,
        "finetune_epochs": 0,
        "method": method,
    }
    if method == "shallow":
        settings["stages"] = row.shallow
    for seed in range(SEEDS):
        yield Run(experiment, method, "", settings, seed)


def queue() -> list[Run]:
    """All runs, the most important first."""
    methods = ("slimstart", "shallow", "uniform")
    found = [run for method in methods for row in ROWS for run in runs(row, 40, method)]
    return found + [run for method in methods for run in runs(ROWS[0], LONG, method)]


def main(arguments: list[str] | None = None) -> int:
    return work_off(queue(), __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

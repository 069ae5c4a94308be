"""Train the rows of the paper at their full length, several processes in parallel; one record for each run.

    PYTHONPATH=src python benchmarks/paper_queue.py --workers 8 --hours 0.16 --data-dir data --out runs/paper

Each run is one `slimstart train`, with a folder below --out. Runs that have a record are not repeated, and the others
continue from their last checkpoint, so the same command continues after an interruption. Records are copied to
`RECORDS/EXPERIMENT/ROW-seedN.json`, where `make results` finds them; docs/results/paper.md is made from those.

Every row is at the FLOPs that the paper reports for it, and has these beside it, trained for as many epochs: the
uniform network, the best shallower one, the default policy, and the dense network where it is affordable.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimstart.io import atomic
from slimstart.lab.recipes.originals import COMPARED, ONE_SHOT
from slimstart.lab.recipes.presets import preset
from slimstart.lab.recipes.recipe import Recipe, merged

Settings = Mapping[str, str | float | int]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        experiment: folder of its record.
        row: row of the experiment's table.
        preset: name of the preset that it starts from.
        settings: what differs from the preset.
    """

    experiment: str
    row: str
    preset: str
    settings: Settings = field(default_factory=dict)
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.row}-seed{self.seed}"

    @property
    def recipe(self) -> Recipe:
        return merged(preset(self.preset), {**self.settings, "seed": self.seed})

    def command(self, out: Path, more: Sequence[str]) -> list[str]:
        settings = {"recipe": self.preset, **self.settings, "seed": self.seed, "out": out / self.name}
        options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return [sys.executable, "-m", "slimstart", "train", "--resume", *options, *more]


# Preset, its budget as a fraction of the FLOPs (the paper's figure), and the number of seeds; the most important first.
# The paper shows CIFAR-100 in a figure only, by the fraction of FLOPs.
ROWS: tuple[tuple[str, float, int], ...] = (
    ("vgg16-cifar10", 0.087, 2),
    ("resnet20-cifar10", 0.361, 2),
    ("vgg19-cifar10-10.3", 0.1027, 1),
    ("vgg19-cifar10-1.7", 0.017, 1),
    ("vgg19-cifar100", 0.10, 1),
    ("resnet32-cifar100", 0.10, 1),
    ("resnet32-cifar100", 0.0156, 1),
    ("vgg19-cifar10-28.6", 0.2857, 1),
    ("vgg19-cifar10-19.3", 0.1933, 1),
    ("vgg19-cifar10-4.9", 0.0494, 1),
    ("wrn28_10-cifar10", 0.079, 1),
)
TOO_LARGE = ("wrn28_10",)  # for dense trainings, and without shallower siblings
CHANNELS = ("vgg16-cifar10", "resnet20-cifar10")  # presets that are trained with the paper's budget of channels, too
TRIAL_EPOCHS = 20  # of each shallower network, of which the best is trained for all epochs

# The methods that the paper compares with: network, method, budget, and the preset of another network if it has none
# of its own. Budgets are the paper's figures; that of slimming is the first row of its own paper, 70 % of the channels.
RIVALS: tuple[tuple[str, str, str | None, str | None], ...] = (
    *(
        (model, method, None, None)
        for model in ("vgg16", "resnet20")
        for method in ("l1", "soft", "thinet", "provable")
    ),
    *((model, "grow-efficient", None, None) for model in ("vgg16", "resnet20")),
    ("wrn28_10", "l1", None, "resnet20"),
    ("wrn28_10", "grow-efficient", None, "resnet20"),
    ("vgg19", "slimming", "channels=0.3", "vgg16"),
)

# What may explain a difference from the paper: one change each, on VGG-16.
ABLATION: dict[str, Settings] = {
    "float32": {"precision": "float32"},
    "both-scores": {"estimator": "vr_pge_symmetric"},
    "one-mask": {"num_masks": 1},
    "capped": {"sampling": "capped"},
    "no-finetuning": {"epochs": 340, "finetune_epochs": 0},
    "finetune-1e-2": {"finetune_lr": 1e-2},
    "decay-1e-4": {"weight_decay": 1e-4},
    "batch-128": {"batch_size": 128},
}


def rows() -> Iterator[Run]:
    """The paper's own rows, with the networks to compare them with."""
    for name, flops, seeds in ROWS:
        recipe = preset(name)
        experiment = f"paper-{recipe.model}-{recipe.data}-{100 * flops:g}"
        budget, length = {"budget": f"flops={flops:g}"}, _without_finetuning(recipe)
        for seed in range(seeds):
            yield Run(experiment, "paper", name, budget, seed)
            if name in CHANNELS:
                yield Run(experiment, "paper-channels", name, {}, seed)
            yield Run(experiment, "uniform", name, {**budget, **length, "method": "uniform"}, seed)
            yield Run(experiment, "slimstart", name, {**budget, **length, "policy": "equal_worth"}, seed)
            if recipe.model not in TOO_LARGE:
                trials = {"method": "shallow", "trial_epochs": TRIAL_EPOCHS}
                yield Run(experiment, "shallow", name, {**budget, **length, **trials}, seed)
    for name, *_ in ROWS:
        if (recipe := preset(name)).model not in TOO_LARGE:
            settings = {**_without_finetuning(recipe), "method": "dense"}
            yield Run(f"paper-{recipe.model}-{recipe.data}-dense", "dense", name, settings)


def _without_finetuning(recipe: Recipe) -> dict[str, str | float | int]:
    """As many epochs in one training, for methods that need no fine-tuning."""
    return {"epochs": recipe.epochs + recipe.finetune_epochs, "finetune_epochs": 0}


def rivals() -> Iterator[Run]:
    """The methods that the paper compares with, each at its own FLOPs and by about its own schedule."""
    for model, method, budget, lender in RIVALS:
        name = f"{method}-{lender or model}-cifar10" + "-uniform" * (method in ONE_SHOT)
        at = budget or f"flops={COMPARED[model, 'cifar10', method].flops / 100:g}"
        yield Run(f"paper-{model}-cifar10-rivals", method, name, {"model": model, "budget": at})


def ablation() -> Iterator[Run]:
    """VGG-16 with one setting of the paper's algorithm changed."""
    for row, settings in ABLATION.items():
        yield Run("paper-vgg16-cifar10-ablation", row, "vgg16-cifar10", {"budget": "flops=0.087", **settings})


def queue() -> list[Run]:
    """All runs, the most important first, each once."""
    return list({run.name: run for run in (*rows(), *rivals(), *ablation())}.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--records", type=Path, default=Path("results"), help="folder that records are copied to")
    parser.add_argument("--workers", type=int, default=8, help="processes in parallel")
    parser.add_argument("--hours", type=float, default=24.0, help="all processes are asked to stop after this time")
    parser.add_argument("--only", default="", help="regular expression that the names of runs must match")
    parser.add_argument("--list", action="store_true", help="print the runs that are missing, and train nothing")
    args, more = parser.parse_known_args(arguments)  # what is left goes to `slimstart train`
    missing = [
        run for run in queue() if re.search(args.only, run.name) and not (args.records / f"{run.name}.json").exists()
    ]
    if args.list:
        print("\n".join(run.name for run in missing))
        return 0
    end, waiting, failed = time.monotonic() + 3600 * args.hours, list(missing), list[str]()
    active: dict[subprocess.Popen[bytes], Run] = {}
    while active or (waiting and time.monotonic() < end):
        while waiting and len(active) < args.workers and time.monotonic() < end:
            run = waiting.pop(0)
            (args.out / run.name).parent.mkdir(parents=True, exist_ok=True)
            with (args.out / f"{run.name}.log").open("ab") as log:
                # One thread each: there is a process for every core, and torch's own threads would fight for them.
                environment = {"OMP_NUM_THREADS": "1", **os.environ}
                active[subprocess.Popen(run.command(args.out, more), stdout=log, stderr=log, env=environment)] = run
        time.sleep(0.2)
        if time.monotonic() >= end:
            for process in active:
                process.terminate()  # it writes a checkpoint, and the next call continues from there
        for process in [one for one in active if one.poll() is not None]:
            run = active.pop(process)
            record = args.out / run.name / "record.json"
            if process.returncode == 0 and record.exists():
                place = args.records / f"{run.name}.json"
                place.parent.mkdir(parents=True, exist_ok=True)
                atomic.write(place, record.read_bytes())
            elif time.monotonic() < end:
                failed.append(run.name)
    done = sum((args.records / f"{run.name}.json").exists() for run in missing)
    print(f"{done} of {len(missing)} missing runs are done; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

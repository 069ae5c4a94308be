"""Train the rows of the paper at their full length, several processes in parallel; one record for each run.

    PYTHONPATH=src python benchmarks/paper_queue.py --workers 8 --hours 0.16 --data-dir data --out runs/paper

Each run is one `slimstart train`, with a folder below --out (`training_queue.py`). docs/results/paper.md is made from
the records.

Every row is at the FLOPs that the paper reports for it, and has these beside it, trained for as many epochs: the
uniform network, the best shallower one, the default policy, and the dense network where it is affordable.
"""

from __future__ import annotations

from collections.abc import Iterator

from training_queue import Run, Settings, work_off

from slimstart.lab.recipes.presets import COMPARED, ONE_SHOT, preset
from slimstart.lab.recipes.recipe import Recipe

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
    return work_off(queue(), __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

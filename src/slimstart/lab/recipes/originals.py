"""The methods to compare with: recipes of their authors on the two small networks of the paper's table 1, and what the
paper reports of them. Its own rows are with the presets.

Budgets are those of the paper's own rows, so that all methods meet at one number of FLOPs. The paper has its CIFAR rows
of L1-Pruning, SoftNet and ThiNet from the study of Provable, which cuts once, by one share of all layers, and retrains
by one schedule: the variants called `-uniform`. Where settings come from:

- **l1**: 160 + 40 epochs, as in the repetition by *Rethinking the Value of Network Pruning*, batch and decay too.
- **soft**: the authors' script for CIFAR, whose first epoch is at a tenth of the learning rate: here it rises.
- **thinet**: the authors have ImageNet only. The dense network is trained as that of `l1`; then every layer is cut by
  itself, two epochs at 1e-3 each. (The authors' has one or two, and more after the last.)
- **provable**: the schedules of its study, retraining from the first learning rate.
- **slimming**: the paper and its code, but for Nesterov's momentum. It is not in the paper's tables.
- **grow-efficient**: 160 epochs, a tenth from 80 and from 120 on; batch 128 and decay 5e-4 are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slimstart.lab.recipes.recipe import Recipe

Settings = dict[str, Any]

BUDGETS = {"vgg16": "flops=0.087", "resnet20": "flops=0.361"}


def _falls(factor: float, moments: Iterable[int], epochs: int, warmup: int = 0) -> str:
    """The schedule that multiplies by a factor at some epochs, where the warm-up is no part of the schedule."""
    # Rounded down: an epoch's first step is not to be a hair too early for its moment.
    shares = [math.floor(1e6 * (at - warmup) / (epochs - warmup)) / 1e6 for at in moments]
    return f"steps:{','.join(map(str, shares))}x{factor:g}"


_TENTHS = _falls(0.1, (80, 120), 160)
_DENSE = {"epochs": 160, "batch_size": 64, "lr": 0.1, "weight_decay": 1e-4, "schedule": _TENTHS}
_L1 = _DENSE | {"finetune_epochs": 40, "finetune_lr": 1e-3}
_SOFT = {
    "epochs": 200,
    "batch_size": 128,
    "lr": 0.1,
    "weight_decay": 5e-4,
    "warmup_epochs": 1.0,
    "schedule": _falls(0.2, (60, 120, 160), 200, 1),
}
_SLIMMING = _DENSE | {"finetune_epochs": 160, "finetune_lr": 0.1, "finetune_schedule": _TENTHS}
_GROWING = {"epochs": 160, "batch_size": 128, "lr": 0.1, "weight_decay": 5e-4, "schedule": _TENTHS}
_STUDY_VGG = {
    "epochs": 300,
    "batch_size": 256,
    "lr": 0.05,
    "weight_decay": 5e-4,
    "warmup_epochs": 10.0,
    "schedule": _falls(0.5, range(30, 300, 30), 300, 10),
    "finetune_epochs": 150,
    "finetune_lr": 0.05,
    "finetune_schedule": _falls(0.5, range(30, 150, 30), 150),
}
_STUDY_RESNET = {
    "epochs": 182,
    "batch_size": 128,
    "lr": 0.1,
    "weight_decay": 1e-4,
    "warmup_epochs": 5.0,
    "schedule": _falls(0.1, (91, 136), 182, 5),
    "finetune_epochs": 182,
    "finetune_lr": 0.1,
    "finetune_schedule": _falls(0.1, (91, 136), 182),
}

_OWN, _UNIFORM = "the authors' recipe", "one fraction for all layers, as in table 1"
# Method, whether it is the uniform variant, what it is, and the settings on VGG-16 and on ResNet-20.
_TABLE: tuple[tuple[str, bool, str, Settings, Settings], ...] = (
    ("l1", False, f"L1-Pruning, {_OWN}", _L1, _L1),
    ("l1", True, f"L1-Pruning, {_UNIFORM}", _STUDY_VGG, _STUDY_RESNET),
    ("soft", False, f"SoftNet, {_OWN}", _SOFT, _SOFT),
    ("soft", True, f"SoftNet, {_UNIFORM}", _STUDY_VGG, _STUDY_RESNET),
    (
        *("thinet", False, f"ThiNet, {_OWN}, layer by layer"),
        _L1 | {"rounds": 13, "finetune_epochs": 26},
        _L1 | {"rounds": 12, "finetune_epochs": 24},
    ),
    ("thinet", True, f"ThiNet, {_UNIFORM}", _STUDY_VGG, _STUDY_RESNET),
    ("provable", False, f"Provable, {_OWN}", _STUDY_VGG, _STUDY_RESNET),
    ("slimming", False, f"network slimming, {_OWN}", _SLIMMING | {"penalty": 1e-4}, _SLIMMING | {"penalty": 1e-5}),
    ("grow-efficient", False, f"GrowEfficient, {_OWN}", _GROWING, _GROWING),
)


def originals() -> Iterator[tuple[str, str, Recipe]]:
    """Name, what it is, and recipe, of every method on every network."""
    for method, uniform, about, *columns in _TABLE:
        for (model, budget), settings in zip(BUDGETS.items(), columns, strict=True):
            protocol = "uniform" if uniform else "original"
            recipe = Recipe(model, data="cifar10", method=method, budget=budget, protocol=protocol, **settings)
            yield f"{method}-{model}-cifar10{'-uniform' * uniform}", about, recipe


# --- the rows of the paper's tables -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paper:
    """A row: percent, and times. What it leaves out is None."""

    accuracy: float
    params: float | None
    flops: float
    train_cost_saving: float | None = None

    def __str__(self) -> str:
        saving = "" if self.train_cost_saving is None else f", {self.train_cost_saving:g}×"
        return f"{self.accuracy:g} % at {self.flops:g} % FLOPs{saving}"


# By network, data set and method: SoftNet is `soft`, Original is `dense`.
COMPARED: dict[tuple[str, str, str], Paper] = {
    # Table 1
    ("vgg16", "cifar10", "dense"): Paper(92.9, 100, 100, 1),
    ("vgg16", "cifar10", "l1"): Paper(91.8, 19.9, 19.9),
    ("vgg16", "cifar10", "soft"): Paper(92.1, 36.0, 36.1),
    ("vgg16", "cifar10", "thinet"): Paper(90.8, 36.0, 36.1),
    ("vgg16", "cifar10", "provable"): Paper(92.4, 5.7, 15.0),
    ("vgg16", "cifar10", "grow-efficient"): Paper(92.5, 5.0, 13.6, 1.22),
    ("resnet20", "cifar10", "dense"): Paper(91.3, 100, 100, 1),
    ("resnet20", "cifar10", "l1"): Paper(90.9, 55.6, 55.4),
    ("resnet20", "cifar10", "soft"): Paper(90.8, 53.6, 50.6),
    ("resnet20", "cifar10", "thinet"): Paper(89.2, 67.1, 67.3),
    ("resnet20", "cifar10", "provable"): Paper(90.8, 37.3, 54.5),
    ("resnet20", "cifar10", "grow-efficient"): Paper(90.91, 35.8, 50.2, 1.13),
    ("wrn28_10", "cifar10", "dense"): Paper(96.2, 100, 100, 1),
    ("wrn28_10", "cifar10", "l1"): Paper(95.2, 20.8, 49.5),
    ("wrn28_10", "cifar10", "grow-efficient"): Paper(95.3, 9.3, 28.3, 1.17),
    # The table of training times, and the text on train-cost dynamics
    ("vgg19", "cifar10", "dense"): Paper(93.84, 100, 100, 1),
    ("vgg19", "cifar10", "grow-efficient"): Paper(92.47, 18.08, 22.74, 1.21),
    # The table of ImageNet-1K
    ("resnet50", "image_folder", "dense"): Paper(77.0, 100, 100, 1),
    ("resnet50", "image_folder", "l1"): Paper(74.7, 85.2, 77.5),
    ("resnet50", "image_folder", "soft"): Paper(74.6, None, 58.2),
    ("resnet50", "image_folder", "provable"): Paper(75.2, 65.9, 70.0),
    ("resnet50", "image_folder", "grow-efficient"): Paper(75.2, 61.2, 50.3, 1.10),
}

# On CIFAR the rows of these are one cut to one share of all layers, whatever their authors did.
ONE_SHOT = frozenset(("l1", "soft", "thinet"))


def compared_with(model: str, data: str, method: str, protocol: str) -> Paper | None:
    """The paper's row for a baseline that is run by this protocol; None where there is none."""
    uniform = method in ONE_SHOT and data == "cifar10"
    return COMPARED.get((model, data, method)) if not uniform or protocol == "uniform" else None

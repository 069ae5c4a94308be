"""The methods to compare with, by the recipes of their authors, on the two small networks of the paper's table 1.

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

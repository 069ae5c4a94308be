"""Named recipes: one for each row of the paper's tables, with the paper's numbers; one with the paper's settings for
any network; one for the embedded data; and those of the methods to compare with, on the two small networks of table 1.

Where each setting of the paper's own rows comes from:

- **Appendix of the paper**: batch 256; SGD with learning rate 0.1 and momentum 0.9 (ImageNet 0.256 and 0.875, warm-up,
  label smoothing 0.1); Adam with 12e-3 on s.
- **The authors' release**: cosine for both learning rates, weight decay 5e-4, 300 epochs, the best of 10 masks on
  training data, 40 epochs of fine-tuning at 1e-3.
- **Ours**, because neither says: rho of each row, such that the search starts at the FLOPs that the paper reports;
  a constant learning rate in fine-tuning; for ImageNet 100 epochs, 5 of them warm-up, no fine-tuning, weight decay
  3.05e-5; FLOPs of networks that the paper shows in figures only.

The methods to compare with have the recipes of their authors, and the budgets of the paper's own rows, so that all meet
at one number of FLOPs. The paper has its CIFAR rows of L1-Pruning, SoftNet and ThiNet from the study of Provable, which
cuts once, by one share of all layers, and retrains by one schedule: the variants called `-uniform`.

- **l1**: 160 + 40 epochs, as in the repetition by *Rethinking the Value of Network Pruning*, batch and decay too.
- **soft**: the authors' script for CIFAR, whose first epoch is at a tenth of the learning rate: here it rises.
- **thinet**: the authors have ImageNet only. The dense network is trained as that of `l1`; then every layer is cut by
  itself, two epochs at 1e-3 each. (The authors' has one or two, and more after the last.)
- **provable**: the schedules of its study, retraining from the first learning rate.
- **slimming**: the paper and its code, but for Nesterov's momentum. It is not in the paper's tables.
- **grow-efficient**: 160 epochs, a tenth from 80 and from 120 on; batch 128 and decay 5e-4 are ours.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slimstart.errors import ConfigError
from slimstart.lab.recipes.recipe import Recipe, merged

# The defaults of a recipe are the other settings of the paper on CIFAR.
CIFAR = Recipe(
    data="cifar10", policy="paper", coupling="filter", resample_every=1, sampling="bernoulli", finetune_epochs=40
)
IMAGENET = merged(
    CIFAR,
    {
        "data": "image_folder",
        "epochs": 100,
        "lr": 0.256,
        "momentum": 0.875,
        "weight_decay": 3.05e-5,
        "warmup_epochs": 5.0,
        "label_smoothing": 0.1,
        "finetune_epochs": 0,
    },
)
FASHION = Recipe(model="small", data="fashion", budget="flops=0.2", epochs=12, batch_size=64)

# --- the methods to compare with -------------------------------------------------------------------------------------

Settings = dict[str, Any]

BUDGETS = {"vgg16": "flops=0.087", "resnet20": "flops=0.361"}


def _falls(factor: float, moments: Iterable[int], epochs: int, warmup: int = 0) -> str:
    """The schedule that multiplies by a factor at some epochs, where the warm-up is no part of the schedule."""
    # Rounded down, so that the first step of an epoch has reached the moment.
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


@dataclass(frozen=True)
class Preset:
    """A recipe, what it is for, and the row of the paper that it repeats, if it has one."""

    recipe: Recipe
    about: str
    paper: Paper | None = None


def _row(base: Recipe, model: str, data: str, keep_ratio: float, about: str, paper: Paper | None = None) -> Preset:
    return Preset(merged(base, {"model": model, "data": data, "budget": f"channels={keep_ratio}"}), about, paper)


PRESETS: dict[str, Preset] = {
    "fashion": Preset(FASHION, "embedded data, a minute on two CPU cores"),
    "paper": Preset(CIFAR, "Algorithm 1 with the paper's settings on CIFAR; name a --model and a --budget"),
    # Table 1
    "vgg16-cifar10": _row(CIFAR, "vgg16", "cifar10", 0.293, "table 1", Paper(92.5, 4.4, 8.7, 8.69)),
    "resnet20-cifar10": _row(CIFAR, "resnet20", "cifar10", 0.536, "table 1", Paper(90.93, 35.1, 36.1, 2.09)),
    "wrn28_10-cifar10": _row(CIFAR, "wrn28_10", "cifar10", 0.218, "table 1", Paper(95.6, 8.4, 7.9, 9.39)),
    # The table of training times, and the figure of dynamics
    "vgg19-cifar10-28.6": _row(CIFAR, "vgg19", "cifar10", 0.533, "training times", Paper(93.46, 23.71, 28.57, 2.64)),
    "vgg19-cifar10-19.3": _row(CIFAR, "vgg19", "cifar10", 0.438, "training times", Paper(93.11, 12.75, 19.33, 3.89)),
    "vgg19-cifar10-14.3": _row(
        CIFAR, "vgg19", "cifar10", 0.377, "train-cost dynamics", Paper(92.73, 16.68, 14.28, 5.28)
    ),
    "vgg19-cifar10-10.3": _row(CIFAR, "vgg19", "cifar10", 0.319, "training times", Paper(92.23, 6.69, 10.27, 7.30)),
    "vgg19-cifar10-4.9": _row(CIFAR, "vgg19", "cifar10", 0.221, "training times", Paper(90.82, 3.06, 4.94, 15.28)),
    "vgg19-cifar10-1.7": _row(CIFAR, "vgg19", "cifar10", 0.128, "training times", Paper(87.97, 0.80, 1.70, 44.68)),
    # Figures without numbers: FLOPs of 10 % and 50 % are ours, 1.56 % is in the text
    "vgg19-cifar100": _row(CIFAR, "vgg19", "cifar100", 0.315, "figure of sparsities, 10 % FLOPs"),
    "resnet32-cifar10": _row(CIFAR, "resnet32", "cifar10", 0.242, "figure of sparsities, 10 % FLOPs"),
    "resnet32-cifar100": _row(CIFAR, "resnet32", "cifar100", 0.087, "figure of sparsities, 1.56 % FLOPs"),
    "mobilenet_v1-imagenet": _row(IMAGENET, "mobilenet_v1", "image_folder", 0.699, "figure of ImageNet, 50 % FLOPs"),
    # The table of ImageNet-1K
    "resnet50-imagenet-46.8": _row(
        IMAGENET, "resnet50", "image_folder", 0.631, "table of ImageNet", Paper(76.0, 48.2, 46.8, 1.60)
    ),
    "resnet50-imagenet-24.7": _row(
        IMAGENET, "resnet50", "image_folder", 0.427, "table of ImageNet", Paper(73.5, 27.0, 24.7, 3.02)
    ),
    "resnet50-imagenet-10.1": _row(
        IMAGENET, "resnet50", "image_folder", 0.251, "table of ImageNet", Paper(69.3, 10.8, 10.1, 7.36)
    ),
}
PRESETS |= {
    name: Preset(recipe, about, compared_with(recipe.model, recipe.data, recipe.method, recipe.protocol))
    for name, about, recipe in originals()
}


def preset(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.4) or list(PRESETS)
        raise ConfigError(f"there is no recipe {name!r}; do you mean {', '.join(close)}? `slimstart recipes` lists all")
    return PRESETS[name].recipe

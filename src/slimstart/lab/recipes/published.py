"""What the paper's tables report of the networks that it compares with; its own rows are with the presets."""

from __future__ import annotations

from dataclasses import dataclass


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

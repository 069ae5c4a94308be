"""Families of plain networks at equal FLOPs: layers per stage, a tilt of the widths, and widths that fill a budget.

A structure is named as in "11222-late": layers (or blocks) of each stage, then the tilt. With tilt p, the ratio of a
stage's channels to those of the first is raised to the power p, so that late stages are wider the larger p is. All
widths are then multiplied by one number, which is found by bisection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from slimstart.costs import CostTable
from slimstart.flop_counter import flops
from slimstart.graph import trace
from slimstart.lab.models.feed_forward import MOBILENET_V1, VGG19, Chain, mobilenet_v1, vgg19
from slimstart.lab.models.layers import Stages, conv_bn_relu, factory
from slimstart.lab.models.residual import RESNET32, resnet32
from slimstart.lab.models.siblings import LATE
from slimstart.policies import Flops
from slimstart.policies.depth import GAMMA, layers_to_remove

TILTS = {"front": 1 / 3, "even": 2 / 3, "own": 1.0, "late": LATE, "later": 1.6}
TOLERANCE = 0.01  # of the FLOPs of a structure, to those of the budget
MOBILENET_V2 = Stages((2, 3, 4, 3, 3), (24, 32, 64, 96, 160))
EXPANSION, STRIDES = 6, (1, 2, 2, 1, 2)


class InvertedResidual(nn.Module):
    """1 x 1 expansion, 3 x 3 depthwise convolution, 1 x 1 projection; a shortcut where the shape allows it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = EXPANSION * inputs
        expansion, depthwise = conv_bn_relu(inputs, inner, 1), conv_bn_relu(inner, inner, stride=stride, groups=inner)
        self.branch = nn.Sequential(*expansion, *depthwise, *conv_bn_relu(inner, outputs, 1)[:-1])  # linear at its end
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.branch(x)
        return x + out if self.has_shortcut else out


class MobileNetV2(Chain):
    """Stages of inverted residuals and a 1 x 1 convolution (Sandler et al., 2018), strided for images of 32 x 32."""

    def __init__(self, stages: Stages, num_classes: int, in_channels: int, width: float) -> None:
        widths = stages.scaled(width)
        channels = widths[0]
        layers = conv_bn_relu(in_channels, channels)
        for depth, outputs, stride in zip(stages.depths, widths, STRIDES, strict=True):
            for position in range(depth):
                layers.append(InvertedResidual(channels, outputs, 1 if position else stride))
                channels = outputs
        layers += conv_bn_relu(channels, 4 * channels, 1)
        super().__init__(layers, 4 * channels, num_classes)


@dataclass(frozen=True)
class Family:
    """Networks of one kind.

    Attributes:
        reference: the network that budgets are fractions of; the deepest.
        kept: layers of each stage of the reference that cannot be removed, because they change the shape. (The rule
            of the library also keeps the last layer of a resolution, so that no stage of `vgg` is empty.)
        budgets: fractions of the reference's FLOPs.
        few: depths of the candidates of a short search, with tilts "own" and "late".
        fixed: the structure that a rule without any search would take.
    """

    make: Callable[..., nn.Module]
    reference: Stages
    kept: tuple[int, ...]
    budgets: tuple[float, ...]
    depths: tuple[str, ...]
    tilts: tuple[str, ...]
    few: tuple[str, ...]
    fixed: str

    @property
    def structures(self) -> list[str]:
        return [f"{depths}-{tilt}" for depths in self.depths for tilt in self.tilts]

    @property
    def candidates(self) -> list[str]:
        return [f"{depths}-{tilt}" for depths in self.few for tilt in ("own", "late")]

    @property
    def deepest(self) -> str:
        return "".join(map(str, self.reference.depths)) + "-own"


FAMILIES = {
    "vgg": Family(
        make=vgg19,
        reference=VGG19,
        kept=(1, 1, 1, 1, 0),
        budgets=(0.1, 0.018),
        depths=("22444", "22333", "22222", "11222", "11111", "11244", "22111", "11110"),
        tilts=("front", "even", "own", "late"),
        few=("22444", "22222", "11222", "11111"),
        fixed="22222-own",
    ),
    "residual": Family(
        make=resnet32,
        reference=RESNET32,
        kept=(0, 1, 1),
        budgets=(0.1, 0.018),
        depths=("555", "333", "222", "111", "123", "112", "122", "113", "321"),
        tilts=("even", "own", "late"),
        few=("555", "333", "222", "123", "112"),
        fixed="222-own",
    ),
    "inverted": Family(
        make=factory(MobileNetV2, MOBILENET_V2),
        reference=MOBILENET_V2,
        kept=(0, 1, 1, 1, 1),
        budgets=(0.25,),
        depths=("23433", "22322", "22222", "12222", "11122", "11111", "11333"),
        tilts=("even", "own", "late"),
        few=("23433", "22222", "11122", "11111"),
        fixed="22222-own",
    ),
    "separable": Family(
        make=mobilenet_v1,
        reference=MOBILENET_V1,
        kept=(1, 1, 1, 1, 1),
        budgets=(0.25,),
        depths=("12262", "12242", "12222", "11121", "11111"),
        tilts=("even", "own", "late"),
        few=("12262", "12222", "11121", "11111"),
        fixed="12222-own",
    ),
}


def network(family: str, structure: str, widths: Sequence[int], num_classes: int, in_channels: int) -> nn.Module:
    """A fresh network of these channels in each stage."""
    one = FAMILIES[family]
    factor = widths[0] / one.reference.channels[0]  # which the stem takes, where it has channels of its own
    stages = Stages(_depths(structure), tuple(width / factor for width in widths))
    return one.make(num_classes, in_channels, factor, stages)


@cache
def solve(family: str, structure: str, budget: float, num_classes: int, shape: tuple[int, int, int]) -> list[int]:
    """Channels of each stage that cost a fraction of the reference's FLOPs, on images of a shape (C, H, W).

    One factor on all widths, rounded, leaves a gap of several per cent where they are small. So each may then differ by
    two: as little as closes the gap.

    Raises:
        ValueError: no such widths cost the same within `TOLERANCE`.
    """
    one = FAMILIES[family]
    target = budget * _flops(family, one.deepest, one.reference.channels, num_classes, shape)
    coefficients = _coefficients(family, structure.partition("-")[0], num_classes, shape)
    first, exponent = one.reference.channels[0], TILTS[structure.partition("-")[2]]
    shares = first * (np.array(one.reference.channels) / first) ** exponent
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = _monomials(middle * shares) @ coefficients <= target
        low, high = (middle, high) if fits else (low, middle)
    exact = high * shares
    near = [range(max(1, round(x) - 2), round(x) + 3) for x in exact]
    options = np.array(list(itertools.product(*near)))
    gaps = np.abs(_monomials(options) @ coefficients / target - 1)
    close = options[gaps < max(TOLERANCE / 3, gaps.min() + 1e-9)]
    change = np.abs(close / exact - 1).sum(1)
    widths = [int(width) for width in close[change.argmin()]]
    gap = _flops(family, structure, widths, num_classes, shape) / target - 1
    if abs(gap) > TOLERANCE:
        raise ValueError(f"{family} {structure} at {budget:g}: the closest widths miss the budget by {gap:.1%}")
    return widths


@cache
def share(family: str, structure: str, budget: float, num_classes: int, shape: tuple[int, int, int]) -> float:
    """The fraction of a structure's FLOPs, at the reference's widths, that a fraction of the reference's is."""
    one = FAMILIES[family]
    return (
        budget
        * _flops(family, one.deepest, one.reference.channels, num_classes, shape)
        / _flops(family, structure, one.reference.channels, num_classes, shape)
    )


@cache
def _coefficients(family: str, depths: str, num_classes: int, shape: tuple[int, int, int]) -> np.ndarray:
    """FLOPs as a polynomial of the stages' channels, from networks of random widths."""
    random, stages = np.random.default_rng(0), len(depths)
    probes = 2 * random.integers(4, 60, (3 * stages + 1, stages))
    costs = [_flops(family, f"{depths}-own", [int(w) for w in probe], num_classes, shape) for probe in probes]
    return np.linalg.lstsq(_monomials(probes), np.array(costs, float), rcond=None)[0]


def _monomials(widths: np.ndarray) -> np.ndarray:
    """Of the polynomial: a convolution has channels of its own stage, or of the one before, or of the image."""
    widths = np.asarray(widths, float)
    return np.concatenate([widths, widths**2, widths[..., 1:] * widths[..., :-1]], -1)


def _flops(family: str, structure: str, widths: Sequence[int], num_classes: int, shape: tuple[int, int, int]) -> int:
    with torch.device("meta"):
        return flops(network(family, structure, widths, num_classes, shape[0]), torch.zeros(1, *shape))


def depths_by_rule(
    family: str, budget: float, exponent: float = GAMMA, total_steps: int | None = None
) -> tuple[int, ...]:
    """Layers of each stage by the rule of `slimstart.policies.depth`, applied to the reference."""
    one, costs = FAMILIES[family], _costs(family)
    removable = [d - kept for d, kept in zip(one.reference.depths, one.kept, strict=True)]
    assert len(costs.layers) == sum(removable), f"{family}: {len(costs.layers)} removable layers, not {sum(removable)}"
    stages = [stage for stage, number in enumerate(removable) for _ in range(number)]
    gone = [stages[layer] for layer in layers_to_remove(costs, Flops(budget), exponent, total_steps)]
    return tuple(depth - gone.count(stage) for stage, depth in enumerate(one.reference.depths))


def nearest(family: str, depths: tuple[int, ...]) -> str:
    """The structure with the family's own ratio of widths whose depths differ least from these."""
    own = [f"{text}-own" for text in FAMILIES[family].depths]
    return min(own, key=lambda name: sum(abs(a - b) for a, b in zip(_depths(name), depths, strict=True)))


@cache
def _costs(family: str) -> CostTable:
    return trace(FAMILIES[family].make(10, 3), torch.zeros(1, 3, 32, 32), "stream").costs


def _depths(structure: str) -> tuple[int, ...]:
    return tuple(map(int, structure.partition("-")[0]))

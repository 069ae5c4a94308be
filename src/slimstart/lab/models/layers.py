"""Common parts of the networks here: scaling by `width`, convolutions, stages, and initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from slimstart.errors import ConfigError

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Stages:
    """Layers (or blocks) of every stage of a network, and the channels of their outputs at width 1."""

    depths: tuple[int, ...]
    channels: tuple[int, ...]

    def scaled(self, width: float) -> list[int]:
        """The channels of the stages, times `width`."""
        return [scaled(channels, width) for channels in self.channels]

    @property
    def layers(self) -> list[list[int]]:
        """The channels of every layer, stage by stage."""
        return [[channels] * depth for depth, channels in zip(self.depths, self.channels, strict=True)]


def scaled(channels: int, width: float) -> int:
    """`channels` times `width`, to the nearest whole number, at least 1."""
    if not 0 < width < math.inf:
        raise ConfigError(f"`width` is {width}; it multiplies channels, so it must be a positive number")
    return max(1, round(channels * width))


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size at stride 1; without bias, which the normalisation after it has."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def conv_bn_relu(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, normalisation and ReLU."""
    return [conv(inputs, outputs, kernel, stride, groups), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def stage(
    block: Callable[[int, int, int], nn.Module], inputs: int, outputs: int, num_blocks: int, stride: int
) -> nn.Sequential:
    """Residual blocks in a row; the first of them changes the shape."""
    if num_blocks < 1:
        raise ValueError(f"a stage has {num_blocks} blocks; it needs one, which changes the shape")
    rest = (block(outputs, outputs, 1) for _ in range(num_blocks - 1))
    return nn.Sequential(block(inputs, outputs, stride), *rest)


def initialised(network: Network) -> Network:
    r"""The same network, with convolutions drawn from :math:`N(0, 2 / n)`, n the outputs that one input reaches.

    That keeps the size of gradients through layers with ReLU (He et al., 2015). PyTorch's own `fan_out`
    ignores groups, and would make the weights of a depthwise layer too small by the square root of the filters.

    Normalisation starts as the identity, also at the end of a residual branch: at zero, the branch would have no
    influence on the loss, nor would masks in it. The classifier has PyTorch's initialisation.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            reached = module.out_channels * math.prod(module.kernel_size) / module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / reached))
    return network


def factory(
    family: Callable[[Stages, int, int, float], Network], stages: Stages, num_classes: int = 10
) -> Callable[..., Network]:
    """The function that makes a network: these stages of a family, or those of a sibling."""

    def make(
        num_classes: int = num_classes, in_channels: int = 3, width: float = 1.0, stages: Stages = stages
    ) -> Network:
        return initialised(family(stages, num_classes, in_channels, width))

    return make

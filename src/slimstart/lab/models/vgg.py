"""VGG with batch normalisation for CIFAR: a chain of 3 x 3 convolutions (Simonyan and Zisserman, 2015).

One linear layer classifies; the original's three wide ones belong to its images of 224 x 224.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slimstart.lab.models.layers import Chain, Stages, conv_bn_relu, initialised, scaled

VGG16 = Stages((2, 2, 3, 3, 3), (64, 128, 256, 512, 512))
VGG19 = Stages((2, 2, 4, 4, 4), VGG16.channels)
SMALL = ((32,), (32, 64), (64, 128))


class VGG(Chain):
    """Stages of convolutions, max pooling between them, global average pooling after the last.

    Args:
        stages: channels of every convolution, stage by stage.
    """

    def __init__(self, stages: Sequence[Sequence[int]], num_classes: int, in_channels: int, width: float) -> None:
        layers: list[nn.Module] = []
        channels = in_channels
        for number, stage in enumerate(stages):
            if number > 0:
                layers.append(nn.MaxPool2d(2))
            for outputs in (scaled(c, width) for c in stage):
                layers += conv_bn_relu(channels, outputs)
                channels = outputs
        super().__init__(layers, channels, num_classes)


def vgg16(num_classes: int = 10, in_channels: int = 3, width: float = 1.0, stages: Stages = VGG16) -> VGG:
    """13 convolutions: 14.7 M parameters, 313 M multiply-adds on 32 x 32."""
    return initialised(VGG(_convolutions(stages), num_classes, in_channels, width))


def vgg19(num_classes: int = 10, in_channels: int = 3, width: float = 1.0, stages: Stages = VGG19) -> VGG:
    """16 convolutions: 20.0 M parameters, 398 M multiply-adds on 32 x 32."""
    return initialised(VGG(_convolutions(stages), num_classes, in_channels, width))


def small(num_classes: int = 10, in_channels: int = 1, width: float = 1.0) -> VGG:
    """Five convolutions, for the embedded 28 x 28 images on two CPU cores: 0.14 M parameters, 11 M multiply-adds."""
    return initialised(VGG(SMALL, num_classes, in_channels, width))


def _convolutions(stages: Stages) -> list[list[int]]:
    return [[channels] * depth for depth, channels in zip(stages.depths, stages.channels, strict=True)]

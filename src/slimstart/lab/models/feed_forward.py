"""Networks without branches: VGG for CIFAR (Simonyan and Zisserman, 2015), MobileNet (Howard et al., 2017).

VGG has batch normalisation, and one linear layer that classifies; the original's three wide ones belong to its images
of 224 x 224.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from slimstart.lab.models.layers import Stages, conv_bn_relu, factory, initialised, scaled

VGG16 = Stages((2, 2, 3, 3, 3), (64, 128, 256, 512, 512))
VGG19 = Stages((2, 2, 4, 4, 4), VGG16.channels)
SMALL = ((32,), (32, 64), (64, 128))
# Depthwise separable convolutions; the image is halved at the beginning of every stage but the first.
MOBILENET_V1 = Stages((1, 2, 2, 6, 2), (64, 128, 256, 512, 1024))
MOBILENET_STEM = 32


class Chain(nn.Module):
    """Layers in a row, global average pooling, a linear classifier."""

    def __init__(self, layers: Sequence[nn.Module], channels: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


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


class MobileNetV1(Chain):
    """A strided stem, then pairs of a 3 x 3 depthwise and a 1 x 1 convolution, each with normalisation and ReLU."""

    def __init__(self, stages: Stages, num_classes: int, in_channels: int, width: float) -> None:
        channels = scaled(MOBILENET_STEM, width)
        layers = conv_bn_relu(in_channels, channels, stride=2)
        for number, (depth, outputs) in enumerate(zip(stages.depths, stages.scaled(width), strict=True)):
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                layers += conv_bn_relu(channels, channels, stride=stride, groups=channels)
                layers += conv_bn_relu(channels, outputs, kernel=1)
                channels = outputs
        super().__init__(layers, channels, num_classes)


def _vgg(stages: Stages, num_classes: int, in_channels: int, width: float) -> VGG:
    return VGG(stages.layers, num_classes, in_channels, width)


vgg16 = factory(_vgg, VGG16)  # 13 convolutions: 14.7 M parameters, 313 M multiply-adds on 32 x 32
vgg19 = factory(_vgg, VGG19)  # 16 convolutions: 20.0 M parameters, 398 M multiply-adds on 32 x 32
mobilenet_v1 = factory(MobileNetV1, MOBILENET_V1, 1000)  # 4.2 M parameters, 569 M multiply-adds on 224 x 224


def small(num_classes: int = 10, in_channels: int = 1, width: float = 1.0) -> VGG:
    """Five convolutions, for the embedded 28 x 28 images on two CPU cores: 0.14 M parameters, 11 M multiply-adds."""
    return initialised(VGG(SMALL, num_classes, in_channels, width))

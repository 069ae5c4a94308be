"""MobileNet for ImageNet: depthwise separable convolutions (Howard et al., 2017)."""

from __future__ import annotations

from slimstart.lab.models.layers import Chain, Stages, conv_bn_relu, initialised, scaled

STEM = 32
# Depthwise separable convolutions; the image is halved at the beginning of every stage but the first.
MOBILENET_V1 = Stages((1, 2, 2, 6, 2), (64, 128, 256, 512, 1024))


class MobileNetV1(Chain):
    """A strided stem, then pairs of a 3 x 3 depthwise and a 1 x 1 convolution, each with normalisation and ReLU."""

    def __init__(self, stages: Stages, num_classes: int, in_channels: int, width: float) -> None:
        channels = scaled(STEM, width)
        layers = conv_bn_relu(in_channels, channels, stride=2)
        for number, (depth, outputs) in enumerate(zip(stages.depths, stages.scaled(width), strict=True)):
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                layers += conv_bn_relu(channels, channels, stride=stride, groups=channels)
                layers += conv_bn_relu(channels, outputs, kernel=1)
                channels = outputs
        super().__init__(layers, channels, num_classes)


def mobilenet_v1(
    num_classes: int = 1000, in_channels: int = 3, width: float = 1.0, stages: Stages = MOBILENET_V1
) -> MobileNetV1:
    """13 separable convolutions: 4.2 M parameters, 569 M multiply-adds on 224 x 224."""
    return initialised(MobileNetV1(stages, num_classes, in_channels, width))

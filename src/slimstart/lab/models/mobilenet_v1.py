"""MobileNet for ImageNet: depthwise separable convolutions (Howard et al., 2017)."""

from __future__ import annotations

from slimstart.lab.models.layers import Chain, conv_bn_relu, initialised, scaled

STEM = 32
# Output channels and stride of each depthwise separable convolution.
BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


class MobileNetV1(Chain):
    """A strided stem, then pairs of a 3 x 3 depthwise and a 1 x 1 convolution, each with normalisation and ReLU."""

    def __init__(self, num_classes: int, in_channels: int, width: float) -> None:
        channels = scaled(STEM, width)
        layers = conv_bn_relu(in_channels, channels, stride=2)
        for wide, stride in BLOCKS:
            outputs = scaled(wide, width)
            layers += conv_bn_relu(channels, channels, stride=stride, groups=channels)
            layers += conv_bn_relu(channels, outputs, kernel=1)
            channels = outputs
        super().__init__(layers, channels, num_classes)


def mobilenet_v1(num_classes: int = 1000, in_channels: int = 3, width: float = 1.0) -> MobileNetV1:
    """13 separable convolutions: 4.2 M parameters, 569 M multiply-adds on 224 x 224."""
    return initialised(MobileNetV1(num_classes, in_channels, width))

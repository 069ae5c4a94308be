"""WideResNet for CIFAR: pre-activation blocks, few but wide (Zagoruyko and Komodakis, 2016)."""

from __future__ import annotations

from torch import Tensor, nn

from slimstart.lab.models.layers import Stages, conv, initialised, scaled, stage

STEM = 16
WRN28_10 = Stages((4, 4, 4), (160, 320, 640))


class WideBlock(nn.Module):
    """Normalisation and ReLU before each of two convolutions, nothing after the sum; no dropout.

    Where the block changes the shape, the shortcut is a convolution that reads the same normalised input as the first
    of the two. Elsewhere it is the identity.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, outputs, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None if stride == 1 and inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu(self.bn1(x))
        residual: Tensor = self.conv2(self.relu(self.bn2(self.conv1(active))))
        return residual + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """A thin stem, and three stages of wide blocks."""

    def __init__(self, stages: Stages, num_classes: int, in_channels: int, width: float) -> None:
        super().__init__()
        stem, (first, second, third) = scaled(STEM, width), stages.scaled(width)
        self.stem = conv(in_channels, stem)
        self.stage1 = stage(WideBlock, stem, first, stages.depths[0], stride=1)
        self.stage2 = stage(WideBlock, first, second, stages.depths[1], stride=2)
        self.stage3 = stage(WideBlock, second, third, stages.depths[2], stride=2)
        self.bn = nn.BatchNorm2d(third)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(third, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(images))))
        logits: Tensor = self.classifier(self.pool(self.relu(self.bn(x))).flatten(1))
        return logits


def wrn28_10(num_classes: int = 10, in_channels: int = 3, width: float = 1.0, stages: Stages = WRN28_10) -> WideResNet:
    """28 layers, 160 to 640 channels: 36.5 M parameters, 5.2 G multiply-adds on 32 x 32."""
    return initialised(WideResNet(stages, num_classes, in_channels, width))

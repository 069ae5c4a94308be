"""ResNet for CIFAR: a 3 x 3 stem, three stages of basic blocks, global average pooling (He et al., 2016).

Where a block changes the shape, its shortcut is a 1 x 1 convolution with normalisation. The original adds channels of
zeros there; the published 0.27 M parameters and 41 M multiply-adds of ResNet-20 are those.
"""

from __future__ import annotations

from torch import Tensor, nn

from slimstart.lab.models.layers import Stages, conv, conv_bn_relu, initialised, stage

RESNET20 = Stages((3, 3, 3), (16, 32, 64))
RESNET32 = Stages((5, 5, 5), (32, 64, 128))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, ReLU after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        out: Tensor = self.relu(self.shortcut(x) + residual)
        return out


class CifarResNet(nn.Module):
    """A stem and three stages of blocks."""

    def __init__(self, stages: Stages, num_classes: int, in_channels: int, width: float) -> None:
        super().__init__()
        first, second, third = stages.scaled(width)
        self.stem = nn.Sequential(*conv_bn_relu(in_channels, first))
        self.stage1 = stage(BasicBlock, first, first, stages.depths[0], stride=1)
        self.stage2 = stage(BasicBlock, first, second, stages.depths[1], stride=2)
        self.stage3 = stage(BasicBlock, second, third, stages.depths[2], stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(third, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(images))))
        logits: Tensor = self.classifier(self.pool(x).flatten(1))
        return logits


def resnet20(num_classes: int = 10, in_channels: int = 3, width: float = 1.0, stages: Stages = RESNET20) -> CifarResNet:
    """Three blocks a stage, 16 to 64 channels: 0.27 M parameters, 41 M multiply-adds on 32 x 32."""
    return initialised(CifarResNet(stages, num_classes, in_channels, width))


def resnet32(num_classes: int = 10, in_channels: int = 3, width: float = 1.0, stages: Stages = RESNET32) -> CifarResNet:
    """Five blocks a stage, 32 to 128 channels, twice the usual: 1.9 M parameters, 276 M multiply-adds on 32 x 32."""
    return initialised(CifarResNet(stages, num_classes, in_channels, width))

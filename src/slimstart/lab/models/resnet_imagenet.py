"""ResNet-50 for ImageNet (He et al., 2016), strided in the 3 x 3 convolutions ("v1.5").

That is the network of 4.1 G multiply-adds; strided in the first 1 x 1 convolutions, as at first, it has 3.9 G.
Parameters have the names that torchvision gives its own, so that weights published for that network load.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from slimstart.lab.models.layers import Stages, conv, initialised, stage

RESNET50 = Stages(
    (3, 4, 6, 3), (64, 128, 256, 512)
)  # channels inside of the blocks; their outputs have four times as many


class Bottleneck(nn.Module):
    """1 x 1 down to `inside` channels, 3 x 3, 1 x 1 up again, and a shortcut; ReLU after the sum."""

    def __init__(self, inside: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, inside, 1)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = conv(inside, inside, 3, stride)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv3 = conv(inside, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        out: Tensor = self.relu(self.downsample(x) + residual)
        return out


class ResNet(nn.Module):
    """A stem that quarters the image, four stages of bottlenecks, global average pooling, for images of any size."""

    def __init__(self, stages: Stages, num_classes: int, in_channels: int, width: float) -> None:
        super().__init__()
        num_blocks, inside = stages.depths, stages.scaled(width)
        outside = [inside[0], *stages.scaled(4 * width)]
        self.conv1 = conv(in_channels, outside[0], 7, 2)
        self.bn1 = nn.BatchNorm2d(outside[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = stage(partial(Bottleneck, inside[0]), outside[0], outside[1], num_blocks[0], stride=1)
        self.layer2 = stage(partial(Bottleneck, inside[1]), outside[1], outside[2], num_blocks[1], stride=2)
        self.layer3 = stage(partial(Bottleneck, inside[2]), outside[2], outside[3], num_blocks[2], stride=2)
        self.layer4 = stage(partial(Bottleneck, inside[3]), outside[3], outside[4], num_blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outside[4], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet50(num_classes: int = 1000, in_channels: int = 3, width: float = 1.0, stages: Stages = RESNET50) -> ResNet:
    """16 bottlenecks: 25.6 M parameters, 4.1 G multiply-adds on 224 x 224."""
    return initialised(ResNet(stages, num_classes, in_channels, width))

"""Residual networks: of CIFAR and of ImageNet (He et al., 2016), and wide ones (Zagoruyko and Komodakis, 2016).

- `resnet20` and `resnet32` have a 3 x 3 stem and three stages of basic blocks. Where a block changes the shape, its
  shortcut is a 1 x 1 convolution with normalisation. The original adds channels of zeros there; the published 0.27 M
  parameters and 41 M multiply-adds of ResNet-20 are those.
- `wrn28_10` has pre-activation blocks, few but wide.
- `resnet50` is strided in the 3 x 3 convolutions ("v1.5"): 4.1 G multiply-adds. Strided in the first 1 x 1
  convolutions, as at first, it has 3.9 G. Parameters have the names that torchvision gives its own, so that weights
  published for that network load.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from slimstart.lab.models.layers import Stages, conv, conv_bn_relu, factory, scaled, stage

RESNET20 = Stages((3, 3, 3), (16, 32, 64))
RESNET32 = Stages((5, 5, 5), (32, 64, 128))
WRN28_10 = Stages((4, 4, 4), (160, 320, 640))
RESNET50 = Stages((3, 4, 6, 3), (64, 128, 256, 512))  # channels inside of the blocks; outputs have four times as many
WIDE_STEM = 16


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, ReLU after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        out: Tensor = self.relu(self.shortcut(x) + residual)
        return out


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
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        out: Tensor = self.relu(self.downsample(x) + residual)
        return out


class CifarResNet(nn.Module):
    """A stem and three stages of basic blocks."""

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


class WideResNet(nn.Module):
    """A thin stem, and three stages of wide blocks."""

    def __init__(self, stages: Stages, num_classes: int, in_channels: int, width: float) -> None:
        super().__init__()
        stem, (first, second, third) = scaled(WIDE_STEM, width), stages.scaled(width)
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


resnet20 = factory(CifarResNet, RESNET20)  # 0.27 M parameters, 41 M multiply-adds on 32 x 32
resnet32 = factory(CifarResNet, RESNET32)  # twice the usual width: 1.9 M parameters, 276 M multiply-adds on 32 x 32
wrn28_10 = factory(WideResNet, WRN28_10)  # 28 layers: 36.5 M parameters, 5.2 G multiply-adds on 32 x 32
resnet50 = factory(ResNet, RESNET50, 1000)  # 16 bottlenecks: 25.6 M parameters, 4.1 G multiply-adds on 224 x 224

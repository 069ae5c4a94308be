"""A network of your own for the program: a factory is all that it needs. From the root of the repository:

    slimstart inspect examples.own_model:make --image 1x28x28 --budget flops=0.2
    slimstart train --model examples.own_model:make --data fashion --budget flops=0.2 --epochs 12

`module:factory` is imported from Python's path or the current folder. The factory may take `num_classes` and
`in_channels`, and returns the dense network; its forward is ordinary PyTorch.
"""

import torch
from torch import Tensor, nn


class Gated(nn.Module):
    """A residual block with a gate for every channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(2 * channels)
        self.conv2 = nn.Conv2d(2 * channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.squeeze = nn.Linear(channels, channels // 4)
        self.excite = nn.Linear(channels // 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(inside.mean((2, 3))))))
        return torch.relu(x + inside * gate[:, :, None, None])


def make(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Gated(32),
        nn.MaxPool2d(2),
        Gated(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )

"""Small networks as `module:factory`, with dropout, so that random numbers matter."""

from torch import Tensor, nn


def with_dropout(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=4, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


class Residual(nn.Module):
    """A block that can be removed, after a layer whose width is that of the stream."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Conv2d(width, 12, 1), nn.Dropout(0.1), nn.Conv2d(12, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.up(x).relu()))


def with_blocks(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(in_channels, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), Residual(), Residual(), Residual()),
        *(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)),
    )

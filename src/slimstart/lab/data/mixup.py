r"""Mixup and CutMix: each image of a batch is mixed with its neighbour in the batch, and so are their labels.

With a share :math:`\lambda \sim \mathrm{Beta}(\alpha, \alpha)`, one for each batch, mixup makes
:math:`\lambda x_i + (1 - \lambda) x_{i-1}` (Zhang et al., 2018), and CutMix pastes a box of :math:`x_{i-1}` of the area
:math:`1 - \lambda` into :math:`x_i` (Yun et al., 2019). Labels become probabilities, :math:`\lambda y_i + (1 - \lambda)
y_{i-1}`. Batches are shuffled, so the neighbour is a random image. With both, one of them is chosen for each batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from slimstart.lab.data.batches import MIXING, Batches, generator


class Mixed:
    """Training batches, mixed; what is drawn for a batch is a pure function of (seed, epoch, index).

    With several processes, each mixes its own share of a batch, with the same draw.

    Args:
        batches: batches of images, and of labels as class indices.
        mixup, cutmix: alpha of each; 0 for none.
    """

    def __init__(self, batches: Batches, num_classes: int, mixup: float, cutmix: float, seed: int) -> None:
        self._batches, self._num_classes, self._seed = batches, num_classes, seed
        self._mixup, self._cutmix = mixup, cutmix

    @property
    def num_images(self) -> int:
        return self._batches.num_images

    @property
    def batch_size(self) -> int:
        return self._batches.batch_size

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """As `Batches.epoch`, but with labels as probabilities, float32 (B, num_classes)."""
        for index, (images, labels) in enumerate(self._batches.epoch(number, start), start):
            yield self._mix(images, labels, generator(self._seed, number, index, MIXING))

    def _mix(self, images: Tensor, labels: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        targets = F.one_hot(labels, self._num_classes).float()
        cuts = bool(random.random() < 0.5) if self._mixup and self._cutmix else bool(self._cutmix)
        alpha = self._cutmix if cuts else self._mixup
        share = float(random.beta(alpha, alpha))
        others = images.roll(1, 0)
        if cuts:
            height, width = images.shape[2:]
            top, bottom, left, right = random_box(height, width, 1 - share, random)
            images = images.clone()
            images[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
            share = 1 - (bottom - top) * (right - left) / (height * width)  # the box may have been cut off
        else:
            images = others.lerp(images, share)
        return images, targets.roll(1, 0).lerp(targets, share)


def random_box(height: int, width: int, area: float, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a box of this part of an image's area, cut off at the border of the image."""
    side = math.sqrt(area)
    row, column = int(random.integers(height)), int(random.integers(width))
    half_height, half_width = int(side * height) // 2, int(side * width) // 2
    return (
        *(max(row - half_height, 0), min(row + half_height, height)),
        *(max(column - half_width, 0), min(column + half_width, width)),
    )

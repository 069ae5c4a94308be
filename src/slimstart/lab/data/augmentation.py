r"""Augmentation of whole batches: RandAugment on uint8 images, and mixup and CutMix on normalised ones.

**RandAugment** (Cubuk et al., 2020): N random operations on each image, one after the other.
The fourteen operations and their ranges are those of torchvision; each computes what Pillow computes. Operations and
signs are drawn for a whole epoch at once, on the CPU, so an image is changed in the same way on every device and in a
run that is resumed. All images of a batch that get the same operation are changed together.

**Mixup and CutMix**: each image of a batch is mixed with its neighbour in the batch, and so are their labels.

With a share :math:`\lambda \sim \mathrm{Beta}(\alpha, \alpha)`, one for each batch, mixup makes
:math:`\lambda x_i + (1 - \lambda) x_{i-1}` (Zhang et al., 2018), and CutMix pastes a box of :math:`x_{i-1}` of the area
:math:`1 - \lambda` into :math:`x_i` (Yun et al., 2019). Labels become probabilities, :math:`\lambda y_i + (1 - \lambda)
y_{i-1}`. Batches are shuffled, so the neighbour is a random image. With both, one of them is chosen for each batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimstart.lab.data.batches import MIXING, RAND_AUGMENT, Batches, Loading, generator

LARGEST = 30.0  # magnitude
_LUMA = (19595, 38470, 7471)  # red, green and blue in grey, in units of 2^-16


class RandAugment:
    """The augmentation of one data set.

    Args:
        num_ops: operations on each image.
        magnitude: how strong they are, from 0 to `LARGEST`.
    """

    def __init__(self, num_ops: int, magnitude: float) -> None:
        self.num_ops, self._strength = num_ops, magnitude / LARGEST

    def draw(self, random: np.random.Generator, num_images: int) -> np.ndarray:
        """(num_ops, num_images) int8: operations of all positions of an epoch; negative for the other sign."""
        operations = random.integers(len(OPERATIONS), size=(self.num_ops, num_images), dtype=np.int8)
        return np.where(random.integers(2, size=operations.shape, dtype=np.int8) > 0, operations, ~operations)

    def __call__(self, images: Tensor, drawn: np.ndarray) -> Tensor:
        """Change a batch.

        Args:
            images: uint8 (B, C, H, W).
            drawn: (num_ops, B), the columns of `draw` for these images.
        """
        images = images.clone()
        for operations in drawn:
            for code in np.unique(operations).tolist():
                index = torch.from_numpy(np.flatnonzero(operations == code)).to(images.device, non_blocking=True)
                # ~n is -1 - n: the same operation with the other sign.
                operation, sign = OPERATIONS[code if code >= 0 else ~code], 1 if code >= 0 else -1
                images[index] = operation(images[index], self._strength, sign)
        return images


class EpochDraws:
    """The operations of one epoch, batch by batch; none without `augment`."""

    def __init__(self, loading: Loading, epoch: int, num_images: int) -> None:
        self._loading, self._augment = loading, loading.augment
        if self._augment is not None:
            self._drawn = self._augment.draw(generator(loading.seed, epoch, 0, RAND_AUGMENT), num_images)

    def __call__(self, images: Tensor, batch: int) -> Tensor:
        """Change the images of batch `batch` of the epoch; uint8 (B, C, H, W)."""
        if self._augment is None:
            return images
        start, size = batch * self._loading.batch_size, self._loading.batch_size
        return self._augment(images, self._drawn[:, self._loading.share.of(start, start + size)])


# --- operations: (images, strength from 0 to 1, sign) -> images ------------------------------------------------------


def _identity(images: Tensor, strength: float, sign: int) -> Tensor:
    return images


def _shear_x(images: Tensor, strength: float, sign: int) -> Tensor:
    return _affine(images, (1.0, sign * 0.3 * strength, 0.0, 0.0, 1.0, 0.0))


def _shear_y(images: Tensor, strength: float, sign: int) -> Tensor:
    return _affine(images, (1.0, 0.0, 0.0, sign * 0.3 * strength, 1.0, 0.0))


def _translate_x(images: Tensor, strength: float, sign: int) -> Tensor:
    shift = int(150 / 331 * images.shape[3] * strength)
    return _affine(images, (1.0, 0.0, float(sign * shift), 0.0, 1.0, 0.0))


def _translate_y(images: Tensor, strength: float, sign: int) -> Tensor:
    shift = int(150 / 331 * images.shape[2] * strength)
    return _affine(images, (1.0, 0.0, 0.0, 0.0, 1.0, float(sign * shift)))


def _rotate(images: Tensor, strength: float, sign: int) -> Tensor:
    angle = math.radians(sign * 30 * strength)
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = images.shape[3] / 2, images.shape[2] / 2
    return _affine(images, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def _affine(images: Tensor, matrix: tuple[float, ...]) -> Tensor:
    """Every pixel from its nearest neighbour under an affine map of coordinates; black from outside of the image."""
    source = _sources(images.shape[2], images.shape[3], matrix).to(images.device, non_blocking=True)
    # The last pixel, which does not exist, is black.
    pixels = F.pad(images.flatten(2), (0, 1))
    return pixels[:, :, source].view_as(images)


@cache
def _sources(height: int, width: int, matrix: tuple[float, ...]) -> Tensor:
    """(H * W,) int64: the pixel that each pixel is taken from; H * W for those outside."""
    a, b, c, d, e, f = matrix
    y, x = np.mgrid[:height, :width] + 0.5
    column, row = np.floor(a * x + b * y + c), np.floor(d * x + e * y + f)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return torch.from_numpy(np.where(inside, row * width + column, height * width).astype(np.int64).ravel())


def _blend(other: Tensor, images: Tensor, factor: float) -> Tensor:
    """`other` + factor * (`images` - `other`), rounded down."""
    return (other + factor * (images.float() - other)).clamp_(0, 255).to(torch.uint8)


def _factor(strength: float, sign: int) -> float:
    return 1 + sign * 0.9 * strength


def _brightness(images: Tensor, strength: float, sign: int) -> Tensor:
    return _blend(images.new_zeros((), dtype=torch.float32), images, _factor(strength, sign))


def _grey(images: Tensor) -> Tensor:
    """(B, 1, H, W) int32."""
    if images.shape[1] != 3:
        return images.to(torch.int32).sum(1, keepdim=True) // images.shape[1]
    red, green, blue = images.to(torch.int32).unbind(1)
    return ((_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue + 0x8000) >> 16)[:, None]


def _color(images: Tensor, strength: float, sign: int) -> Tensor:
    return _blend(_grey(images).float(), images, _factor(strength, sign))


def _contrast(images: Tensor, strength: float, sign: int) -> Tensor:
    grey = _grey(images)
    total, count = grey.sum((1, 2, 3)), grey[0].numel()
    mean = (2 * total + count) // (2 * count)  # to the nearest whole number
    return _blend(mean.float().view(-1, 1, 1, 1), images, _factor(strength, sign))


def _sharpness(images: Tensor, strength: float, sign: int) -> Tensor:
    if min(images.shape[2:]) < 3:
        return images
    whole = images.to(torch.int32)
    rows = whole[:, :, :-2] + whole[:, :, 1:-1] + whole[:, :, 2:]
    near = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * whole[:, :, 1:-1, 1:-1]
    smooth = whole.clone()  # the border is left as it was
    smooth[:, :, 1:-1, 1:-1] = (2 * near + 13) // 26
    return _blend(smooth.float(), images, _factor(strength, sign))


def _posterize(images: Tensor, strength: float, sign: int) -> Tensor:
    bits = 8 - round(4 * strength)
    return images.bitwise_and(256 - 2 ** (8 - bits))


def _solarize(images: Tensor, strength: float, sign: int) -> Tensor:
    return torch.where(images.float() >= 255 * (1 - strength), 255 - images, images)


def _autocontrast(images: Tensor, strength: float, sign: int) -> Tensor:
    least, most = images.amin((2, 3), keepdim=True).double(), images.amax((2, 3), keepdim=True).double()
    scale = 255 / (most - least).clamp(min=1)
    stretched = (images.double() * scale - least * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(most > least, stretched, images)


def _equalize(images: Tensor, strength: float, sign: int) -> Tensor:
    planes = images.flatten(2).flatten(0, 1).long()  # (B * C, H * W)
    counts = torch.zeros(len(planes), 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(1, planes, torch.ones_like(planes))
    last = counts.gather(1, planes.amax(1, keepdim=True))
    step = (planes.shape[1] - last) // 255
    before = counts.cumsum(1) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp_(max=255)
    found = torch.where(step > 0, table.gather(1, planes), planes)
    return found.to(torch.uint8).view_as(images)


OPERATIONS: tuple[Callable[[Tensor, float, int], Tensor], ...] = (
    *(_identity, _shear_x, _shear_y, _translate_x, _translate_y, _rotate, _brightness, _color),
    *(_contrast, _sharpness, _posterize, _solarize, _autocontrast, _equalize),
)


# --- mixup and CutMix -------------------------------------------------------------------------------------------------


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

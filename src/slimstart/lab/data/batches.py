"""The interface of data sets: batches of an epoch, each a pure function of (seed, epoch, index).

All random numbers of an epoch come from generators that are seeded by the seed and the number of the epoch, on the CPU.
So batch k of epoch n does not depend on what came before it, on the device or on the number of worker processes, and a
resumed training sees the same batches as one that was not stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from slimstart.errors import ConfigError

if TYPE_CHECKING:
    from slimstart.lab.data.augmentation import RandAugment

# Evaluation keeps no activations for a backward, so its batches may be larger: fewer launches on a GPU.
TEST_BATCHES = 4

# Last number of the key of a generator: what its random numbers are for, besides order, crops and flips.
RAND_AUGMENT, MIXING = 1, 2


@dataclass(frozen=True)
class Share:
    """The part of every batch that one of several processes takes: the `rank`-th of `size` parts, as even as possible.

    All processes iterate over the same batches, and each makes only its own part of them.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"`rank` is {self.rank}; it must be from 0 to {self.size - 1}, of {self.size}")

    def of(self, start: int, end: int) -> slice:
        """This part of the batch that begins at `start` and ends before `end`."""
        length = end - start
        return slice(start + length * self.rank // self.size, start + length * (self.rank + 1) // self.size)


WHOLE = Share()
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loading:
    """How the batches of a data set are made; the fields are described at `load`."""

    batch_size: int
    seed: int = 0
    device: torch.device = CPU
    validation: int = 0
    image_size: int | None = None
    num_workers: int = 0
    share: Share = WHOLE
    augment: RandAugment | None = None


class Batches(Protocol):
    """The batches of one part of a data set; sizes are those of whole batches, before they are divided."""

    @property
    def num_images(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    def __len__(self) -> int:
        """Batches per epoch."""
        ...

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches `start`, `start` + 1, ... of an epoch: float32 images (B, C, H, W), normalised, and int64 labels."""
        ...


@dataclass(frozen=True)
class ImageData:
    """A data set, ready for training.

    `train` is shuffled and augmented, and drops its last short batch. `test` is complete, in order, and not augmented.
    """

    name: str
    num_classes: int
    image_shape: tuple[int, int, int]
    train: Batches
    test: Batches
    digest: str  # of the labels in their order, or of the files' names; a run is resumed with the same data only


def digest_of(*arrays: np.ndarray) -> str:
    """A short hash of labels, or of names of files, in this order."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]


def generator(seed: int, *key: int) -> np.random.Generator:
    """A generator for one purpose, independent of those with other keys and of global ones."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def hold_out(num_images: int, num_held: int) -> tuple[Tensor, Tensor]:
    """Indices of the images to train on, and of `num_held` to validate on; both rising.

    The choice is random but the same for every seed: runs with different seeds are compared on the same images.
    """
    if not 0 <= num_held < num_images:
        raise ConfigError(
            f"`validation` is {num_held}; it takes images from the {num_images:,} for training and must leave some"
        )
    order = torch.from_numpy(generator(0).permutation(num_images))
    return order[num_held:].sort().values, order[:num_held].sort().values


def num_full_batches(num_images: int, loading: Loading) -> int:
    """Batches per epoch of training, without the last short one."""
    batch_size, share = loading.batch_size, loading.share
    if not 1 <= batch_size <= num_images:
        raise ConfigError(f"`batch_size` is {batch_size}; it must be from 1 to {num_images:,}, the images for training")
    if batch_size < share.size:
        raise ConfigError(f"`batch_size` is {batch_size}; each of {share.size} processes needs an image of every batch")
    return num_images // batch_size


def indices_from(start: int, num_batches: int) -> range:
    """The remaining batches of an epoch; `start` may be its end, if a run was stopped between two epochs."""
    if not 0 <= start <= num_batches:
        raise ConfigError(f"`start` is {start}; an epoch has {num_batches} batches")
    return range(start, num_batches)


class Normalise:
    """(x / 255 - mean) / std per channel, of uint8 images (B, C, H, W), on their device."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self._mean = 255 * torch.tensor(mean, device=device).view(-1, 1, 1)
        self._std = 255 * torch.tensor(std, device=device).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        # Two operations with correct rounding give the same bits on every device; one fused operation would not.
        return images.to(torch.float32).sub_(self._mean).div_(self._std)

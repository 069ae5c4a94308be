"""Data sets that fit in memory: uint8 images on the device, cropped, flipped and normalised there, a batch at a time.

A batch is one indexing operation on a view of every crop of every image, so there is no loop over images, no worker
process and no waiting for the device. On a GPU a batch is made on a stream of its own, in parallel to the last step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimstart.errors import DataError
from slimstart.lab.data.augmentation import EpochDraws
from slimstart.lab.data.batches import (
    TEST_BATCHES,
    ImageData,
    Loading,
    Normalise,
    digest_of,
    generator,
    hold_out,
    indices_from,
    num_full_batches,
)

IMAGES_AT_ONCE = 4096


@dataclass(frozen=True)
class ArraySet:
    """A data set as arrays: images uint8 (N, C, H, W), labels int64 (N,)."""

    name: str
    num_classes: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int  # pixels by which training images are shifted, at most
    flip: bool = True  # training images are mirrored at random

    def batches(self, loading: Loading) -> ImageData:
        """Both parts on the device; with `validation`, held-out training images replace the test images."""
        (images, labels), validation = self.train, loading.validation
        kept, held = hold_out(len(images), validation)
        test = (images[held], labels[held]) if validation else self.test
        train = (images[kept], labels[kept]) if validation else self.train
        normalise = Normalise(self.mean, self.std, loading.device)
        return ImageData(
            name=self.name,
            num_classes=self.num_classes,
            image_shape=(images.shape[1], images.shape[2], images.shape[3]),
            train=Augmented(*train, normalise, self.padding, self.flip, loading),
            test=InOrder(*test, normalise, loading),
            digest=digest_of(train[1].numpy(), test[1].numpy()),
        )


def as_tensors(images: np.ndarray, labels: np.ndarray, num_classes: int, source: object) -> tuple[Tensor, Tensor]:
    """Checked tensors (N, C, H, W) and (N,), from images (N, H, W, C) or (N, H, W) and labels of any integer type.

    Raises:
        DataError: names `source` and what is wrong in it.
    """
    problem = None
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        problem = f"images of type {images.dtype} and shape {images.shape}, not uint8 (N, height, width, channels)"
    elif labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or not labels.size:
        problem = f"{len(images)} images, but labels of type {labels.dtype} and shape {labels.shape}"
    elif labels.min() < 0 or labels.max() >= num_classes:
        problem = f"labels from {labels.min()} to {labels.max()}, not from 0 to {num_classes - 1}"
    if problem:
        raise DataError(f"{source} has {problem}: it is another data set, or damaged")
    planes = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(planes)), torch.from_numpy(labels.astype(np.int64))


def in_parallel(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches; on a GPU they are made on a stream of their own, in parallel to the caller's work."""
    if device.type != "cuda":
        yield from batches
        return
    stream, done = torch.cuda.Stream(device), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(device))  # that has loaded the images, and drawn the plan
    while True:
        with torch.cuda.stream(stream):
            batch = next(batches, None)
            done.record()
        if batch is None:
            return
        here = torch.cuda.current_stream(device)
        here.wait_event(done)
        for tensor in batch:
            tensor.record_stream(here)  # its memory is not given away before the caller's stream has read it
        yield batch


class InOrder:
    """All images in order, without augmentation; the same in every epoch."""

    def __init__(self, images: Tensor, labels: Tensor, normalise: Normalise, loading: Loading) -> None:
        self.num_images, self._share = len(images), loading.share
        self.batch_size = min(TEST_BATCHES * loading.batch_size, self.num_images)
        self._images, self._labels = images.to(loading.device), labels.to(loading.device)
        self._normalise = normalise

    def __len__(self) -> int:
        return -(-self.num_images // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        starts = (i * self.batch_size for i in indices_from(start, len(self)))
        slices = (self._share.of(i, min(i + self.batch_size, self.num_images)) for i in starts)
        return ((self._normalise(self._images[one]), self._labels[one]) for one in slices)


class Augmented:
    """Shuffled images, each shifted by up to `padding` pixels of black, flipped at random, and changed by `augment`."""

    def __init__(
        self, images: Tensor, labels: Tensor, normalise: Normalise, padding: int, flip: bool, loading: Loading
    ) -> None:
        device = loading.device
        self.num_images, self.batch_size = len(images), loading.batch_size
        self._num_batches = num_full_batches(self.num_images, loading)
        self._num_shifts, self._flip = 2 * padding + 1, flip
        self._loading, self._device, self._normalise = loading, device, normalise
        # On a GPU the time is that of kernel launches: those of several batches take no longer than those of one.
        # RandAugment has the operations of one batch after the other.
        together = device.type == "cuda" and loading.augment is None
        self._at_once = max(1, IMAGES_AT_ONCE // self.batch_size) if together else 1
        padded = F.pad(images.to(device), (padding,) * 4)
        # Every crop of every image, (N, C, top, left, H, W): a view, in which a batch of crops is one index.
        self._crops = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
        self._labels = labels.to(device)

    def __len__(self) -> int:
        return self._num_batches

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        draws = EpochDraws(self._loading, number, len(self) * self.batch_size)
        return in_parallel(self._batches(indices_from(start, len(self)), self._draw(number), draws), self._device)

    def _batches(self, left: range, plan: Tensor, draws: EpochDraws) -> Iterator[tuple[Tensor, Tensor]]:
        size = plan.shape[2]
        for first in left[:: self._at_once]:
            end = min(first + self._at_once, left.stop)
            crops, labels = self._batch(*plan[:, first:end].flatten(1))
            images = self._normalise(draws(crops, first))
            yield from zip(images.split(size), labels.split(size), strict=True)

    def _draw(self, epoch: int) -> Tensor:
        """Which image, top, left and flip, for each position of each batch: int64 (4, batches, B), on the device."""
        random = generator(self._loading.seed, epoch)
        order = random.permutation(self.num_images)
        shifts = random.integers(self._num_shifts, size=(2, self.num_images))
        flips = random.integers(2, size=(1, self.num_images))
        rows = torch.from_numpy(np.concatenate([order[None], shifts, flips]))
        in_batches = rows[:, : len(self) * self.batch_size].unflatten(1, (len(self), self.batch_size))
        plan: Tensor = in_batches[:, :, self._loading.share.of(0, self.batch_size)].contiguous()
        # From pinned memory the copy is queued like a kernel; otherwise the host would wait for the device.
        return plan.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else plan

    def _batch(self, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> tuple[Tensor, Tensor]:
        crops = self._crops[index, :, top, left]
        if self._flip:
            crops = torch.where(flip.bool()[:, None, None, None], crops.flip(-1), crops)
        return crops, self._labels[index]

"""A folder of images by class, as ImageNet is kept: `train/CLASS/*` and `val/CLASS/*`, in the formats of `FORMATS`.

Training: a random part of the image (8 to 100 % of its area, ratio 3/4 to 4/3), resized and flipped or not. Testing:
the centre of the image. Both are one box of the image resized to `image_size`, so a JPEG is decoded only as finely as
its box needs. Worker processes decode to uint8; the device normalises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from slimstart.errors import ConfigError, DataError
from slimstart.io.files import open_to_read
from slimstart.lab.data.augmentation import EpochDraws
from slimstart.lab.data.batches import (
    ImageData,
    Loading,
    Normalise,
    digest_of,
    generator,
    hold_out,
    indices_from,
    num_full_batches,
)

IMAGE_SIZE = 224
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif")
# Without this list Pillow looks into a file for any format, and opens some with other programs (EPS with Ghostscript).
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
MAX_PIXELS = 89_478_485  # where Pillow warns
_FEW_PIXELS, _MAX_PIXELS_PER_BYTE = 1 << 22, 1000  # larger images than the first have at most that many
_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # tags of TIFF
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet

_SHORT_SIDE = 256 / 224  # of a test image, in units of `image_size`, before its centre is cut out
_MIN_AREA, _MAX_RATIO, _TRIES = 0.08, 4 / 3, 10

Box = tuple[float, float, float, float]  # left, top, right, bottom


def load(folder: Path, loading: Loading) -> ImageData:
    """Find the images in `folder`; none is opened yet.

    Raises:
        DataError: a folder is missing or has no images, or the classes of `train` and `val` differ.
    """
    image_size = IMAGE_SIZE if loading.image_size is None else loading.image_size
    if image_size < 1:
        raise ConfigError(f"`image_size` is {image_size}; it must be 1 or more")
    classes, train = _scan(folder / "train")
    if len(classes) < 2:
        raise DataError(f"{folder / 'train'} has the class {classes[0]} only; there is nothing to learn from one class")
    if loading.validation:
        kept, held = (indices.numpy() for indices in hold_out(len(train.labels), loading.validation))
        train, test = train.select(kept), train.select(held)
    else:
        test_classes, test = _scan(folder / "val")
        if odd := sorted(set(classes) ^ set(test_classes)):
            raise DataError(f"`train` and `val` in {folder} must have the same classes; only one has {_few(odd)}")
    return ImageData(
        name="image_folder",
        num_classes=len(classes),
        image_shape=(3, image_size, image_size),
        train=FolderBatches(train, image_size, loading, is_training=True),
        test=FolderBatches(test, image_size, replace(loading, augment=None), is_training=False),
        digest=digest_of(train.names, test.names),  # which begin with those of the classes
    )


@dataclass(frozen=True)
class Files:
    """Paths below `root`, and labels, as arrays: the memory of a list would be copied into every worker."""

    root: Path
    names: np.ndarray
    labels: np.ndarray

    def select(self, indices: np.ndarray) -> Files:
        return Files(self.root, self.names[indices], self.labels[indices])


def _scan(root: Path) -> tuple[list[str], Files]:
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; images are read from train/CLASS/* and val/CLASS/* in --data-dir")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {name: sorted(n for n in os.listdir(root / name) if n.lower().endswith(EXTENSIONS)) for name in classes}
    if not classes:
        raise DataError(f"{root} has no folders; there must be one for each class, with its images")
    if empty := [name for name, files in found.items() if not files]:
        raise DataError(f"{root} has no images ({', '.join(EXTENSIONS)}) in {_few(empty)}")
    names = [os.fsencode(f"{name}/{file}") for name, files in found.items() for file in files]
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in found.values()])
    return classes, Files(root, np.array(names), labels)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class FolderBatches:
    """Batches of decoded files: shuffled and augmented for training, otherwise in order and centred."""

    def __init__(self, files: Files, image_size: int, loading: Loading, is_training: bool) -> None:
        self.num_images, self.batch_size = len(files.labels), loading.batch_size
        self._num_batches = math.ceil(self.num_images / self.batch_size)
        if is_training:
            self._num_batches = num_full_batches(self.num_images, loading)
        self._files, self._image_size, self._loading, self._is_training = files, image_size, loading, is_training
        self._normalise = Normalise(MEAN, STD, loading.device)

    def __len__(self) -> int:
        return self._num_batches

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        left = indices_from(start, len(self))
        starts, order, how = (i * self.batch_size for i in left), np.arange(self.num_images), self._loading
        if self._is_training:
            order = generator(how.seed, number).permutation(order)
        loader = DataLoader(
            _Decoded(self._files, self._image_size, (how.seed, number) if self._is_training else None),
            batch_size=None,  # an item is a whole batch
            sampler=[order[how.share.of(i, min(i + self.batch_size, self.num_images))] for i in starts],
            num_workers=how.num_workers,
            pin_memory=how.device.type == "cuda",
            generator=torch.Generator(),  # without one of its own it would draw from the global one
        )
        draws, batches = EpochDraws(how, number, self.num_images), iter(loader)
        try:
            for index in left:
                yield self._finish(next(batches), draws, index)
        finally:
            del batches  # ends the workers now: the traceback of an error may keep this frame for long

    def _finish(
        self, decoded: tuple[Tensor, Tensor] | DataError, draws: EpochDraws, index: int
    ) -> tuple[Tensor, Tensor]:
        if isinstance(decoded, DataError):
            raise decoded
        images, labels = (tensor.to(self._loading.device, non_blocking=True) for tensor in decoded)
        return self._normalise(draws(images.permute(0, 3, 1, 2).contiguous(), index)), labels


class _Decoded(Dataset[tuple[Tensor, Tensor] | DataError]):
    """Batches of uint8 images (B, H, W, C) and labels, by the indices of their files; runs in the workers."""

    def __init__(self, files: Files, image_size: int, seed: tuple[int, int] | None) -> None:
        self._files, self._image_size, self._seed = files, image_size, seed

    def __getitem__(self, indices: np.ndarray) -> tuple[Tensor, Tensor] | DataError:
        images = np.empty((len(indices), self._image_size, self._image_size, 3), np.uint8)
        for image, index in zip(images, indices, strict=True):
            path = self._files.root / os.fsdecode(self._files.names[index])
            try:
                image[:] = self._decode(path, int(index))
            except Exception as error:  # Pillow has no one error for damaged files
                # Returned, because a raised exception would arrive with the traceback of the worker.
                return DataError(f"{path} cannot be decoded: {error}; remove the file or replace it")
        return torch.from_numpy(images), torch.from_numpy(self._files.labels[indices])

    def _decode(self, path: Path, index: int) -> np.ndarray:
        size = self._image_size
        with open_to_read(path) as file, Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            num_bytes = os.fstat(file.fileno()).st_size
            check_size(width, height, num_bytes)
            if image.format == "TIFF":  # whose tiles are decoded as a whole, even where they are larger than the image
                tags = getattr(image, "tag_v2", {})
                check_size(int(tags.get(_TILE_WIDTH, 1)), int(tags.get(_TILE_HEIGHT, 1)), num_bytes)
            if self._seed is None:
                box, flip = centre_box(width, height), False
            else:
                box, flip = random_box(width, height, generator(*self._seed, index))
            left, top, right, bottom = box
            # A JPEG can be decoded at 1/2, 1/4 or 1/8; the box must still have all pixels that are asked for.
            wanted = math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))
            draft = image.draft("RGB", wanted)
            scale = draft[1][2] / width if draft else 1.0  # exact; the reduced size is rounded up
            area = (left * scale, top * scale, right * scale, bottom * scale)
            part = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, area)
        return np.asarray(part)[:, ::-1] if flip else np.asarray(part)


def check_size(width: int, height: int, num_bytes: int) -> None:
    """Refuse an image that would take much memory, before it is decoded.

    Raises:
        DataError: it is larger than `MAX_PIXELS`, or claims far more pixels than a file of that many bytes holds.
    """
    num_pixels = width * height
    if num_pixels > MAX_PIXELS:
        raise DataError(f"it has {width} x {height} pixels, more than {MAX_PIXELS:,}")
    if num_pixels > max(_FEW_PIXELS, _MAX_PIXELS_PER_BYTE * num_bytes):
        raise DataError(f"it claims {width} x {height} pixels in {num_bytes:,} bytes")


def random_box(width: int, height: int, random: np.random.Generator) -> tuple[Box, bool]:
    """A box of random area, ratio and place, and whether to flip it.

    Of ten draws the first that fits is taken; if none does, the largest centred box of an allowed ratio.
    """
    areas = width * height * random.uniform(_MIN_AREA, 1, _TRIES)
    ratios = np.exp(random.uniform(-math.log(_MAX_RATIO), math.log(_MAX_RATIO), _TRIES))
    u, v, flip = random.random(3)
    for w, h in zip(np.sqrt(areas * ratios).round(), np.sqrt(areas / ratios).round(), strict=True):
        if 1 <= w <= width and 1 <= h <= height:
            left, top = math.floor(u * (width - w + 1)), math.floor(v * (height - h + 1))
            return (left, top, left + float(w), top + float(h)), bool(flip < 0.5)
    w, h = min(width, height * _MAX_RATIO), min(height, width * _MAX_RATIO)
    return ((width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2), bool(flip < 0.5)


def centre_box(width: int, height: int) -> Box:
    """The image after the short side is resized to `image_size` * 256 / 224 and the centre is cut out."""
    side = min(width, height) / _SHORT_SIDE
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2

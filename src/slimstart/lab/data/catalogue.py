"""The data sets by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from slimstart.errors import ConfigError
from slimstart.lab.data import cifar, fashion, image_folder, own_data, tiny_imagenet
from slimstart.lab.data.augmentation import RandAugment
from slimstart.lab.data.batches import WHOLE, ImageData, Loading, Share
from slimstart.lab.own_code import is_factory

NAMES = ("fashion", "cifar10", "cifar100", "tiny_imagenet16", "image_folder")


def load(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    batch_size: int,
    seed: int = 0,
    device: str | torch.device = "cpu",
    validation: int = 0,
    image_size: int | None = None,
    num_workers: int = 0,
    download: bool = True,
    progress: Callable[[int, int | None], None] | None = None,
    share: Share = WHOLE,
    augment: RandAugment | None = None,
) -> ImageData:
    """Load a data set; its batches come on `device`.

    Args:
        name: one of `NAMES`, or `module:factory` for data of the user's own (`own_data`). `fashion` is part of the
            package; the others are read from `data_dir`.
        data_dir: the folder of the files, or the file itself; by default `data`. Each data set's module lists the files
            that it accepts.
        batch_size: images of a training batch. Test batches may be larger.
        seed: seed of the order and of the augmentation.
        device: device of the batches. Data sets that fit in memory are stored there.
        validation: with N > 0, `test` is N of the training images, always the same ones, and `train` the others: for
            choosing hyper-parameters, which must never see the test images.
        image_size: side of the images of an `image_folder`, 224 if not given. The other sets have their own.
        num_workers: processes that decode an `image_folder`; 0 decodes in this one. The others need none.
        download: fetch CIFAR into `data_dir` if it is not there.
        share: the part of every batch that this process takes; `batch_size` is that of the whole batch.
        augment: RandAugment of the training images, after the crop and the flip.
        progress: called with the bytes that are downloaded and their total (None if unknown).

    Raises:
        ConfigError: an argument is out of range.
        DataError: the data is missing, truncated or corrupt; the message says what to do.
    """
    if name not in NAMES and not is_factory(name):
        raise ConfigError(f"`name` is {name!r}; the data sets are {', '.join(NAMES)}, and module:factory")
    for argument, value in (("seed", seed), ("num_workers", num_workers)):
        if value < 0:
            raise ConfigError(f"`{argument}` is {value}; it must be 0 or more")
    folder = Path("data" if data_dir is None else data_dir)
    loading = Loading(batch_size, seed, torch.device(device), validation, image_size, num_workers, share, augment)
    if name == "image_folder":
        return image_folder.load(folder, loading)
    if is_factory(name):
        found = own_data.from_factory(name, {"data_dir": None if data_dir is None else folder, **vars(loading)})
        if isinstance(found, ImageData):
            return found
        arrays = found
    elif name == "fashion":
        arrays = fashion.read()
    elif name == "tiny_imagenet16":
        arrays = tiny_imagenet.read(folder)
    else:
        arrays = cifar.read(cifar.FORMATS[name], folder, download=download, progress=progress)
    side = arrays.train[0].shape[-1]
    if image_size not in (None, side):
        raise ConfigError(f"`image_size` is {image_size}; {name} has images of {side} x {side}, and only those")
    return arrays.batches(loading)

"""A data set of the user's own, named as `module:factory`, and what the factory returns.

The factory is called with those of these arguments that its signature has: `data_dir` (what --data-dir says, or None),
`image_size`, `batch_size`, `seed`, `device`, `validation`, `num_workers`, `share` and `augment`, as for `load`. It
returns one of three things:

- **Two pairs of arrays**, `(train_images, train_labels), (test_images, test_labels)`: images uint8 (N, height, width,
  channels) or (N, height, width), NumPy arrays or tensors; labels whole numbers from 0. Training images are shifted by
  up to an eighth of their height, flipped at random, and normalised by their own mean and standard deviation.
- **An `ArraySet`**, which says the same with other shifts, without flips, or with another normalisation.
- **An `ImageData`**, for images that are not held in memory. Its batches must be pure functions of (seed, epoch, index)
  as `Batches` describes, held out and divided between processes as the arguments say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimstart.errors import ConfigError, DataError
from slimstart.lab.data.arrays import ArraySet, as_tensors
from slimstart.lab.data.batches import ImageData
from slimstart.lab.own_code import call, find_factory, parameters_of

_RETURNS = "two pairs of images and labels, an ArraySet or an ImageData"


def from_factory(spec: str, arguments: dict[str, Any]) -> ArraySet | ImageData:
    """The data set that a user's factory makes.

    Args:
        spec: as for `find_factory`.
        arguments: those that the factory may take.

    Raises:
        ConfigError: there is no such factory, it fails, or what it returns is no data set.
        DataError: the arrays that it returns do not fit each other.
    """
    factory = find_factory(spec, _RETURNS)
    named, takes_any = parameters_of(factory)
    found = call(factory, spec, arguments if takes_any else {n: v for n, v in arguments.items() if n in named})
    if isinstance(found, ImageData) and arguments["augment"] is not None and not (takes_any or "augment" in named):
        raise ConfigError(
            f"`rand_augment` is set, but {spec!r} makes its own batches and takes no `augment`; leave it out, or let "
            "the factory take it"
        )
    if isinstance(found, ArraySet | ImageData):
        return found
    try:
        train, test = ((_array(images), _array(labels)) for images, labels in found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{spec!r} returns a {type(found).__name__}; a factory must return {_RETURNS}") from error
    return _array_set(spec, train, test)


def _array_set(spec: str, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> ArraySet:
    if not (train[1].size and test[1].size):
        raise DataError(f"{spec} has {train[1].size} training and {test[1].size} test images; it needs some of both")
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    parts = [
        as_tensors(images, labels, num_classes, f"{spec}, {name} images,")
        for name, (images, labels) in (("training", train), ("test", test))
    ]
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        shapes = " and ".join(str(tuple(images.shape[1:])) for images, _ in parts)
        raise DataError(f"{spec} has training and test images of shapes {shapes}; they must be the same")
    mean, std = _moments(parts[0][0])
    return ArraySet(spec, num_classes, parts[0], parts[1], mean, std, padding=parts[0][0].shape[2] // 8)


def _array(values: Any) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, as fractions of 255; exact, whatever the number of images."""
    counts = torch.stack([torch.bincount(images[:, c].flatten().long(), minlength=256) for c in range(images.shape[1])])
    share, levels = counts.double() / counts.sum(1, keepdim=True), torch.arange(256).double() / 255
    mean = (share * levels).sum(1)
    std = (share * (levels - mean[:, None]) ** 2).sum(1).sqrt().clamp(min=1 / 255)
    return tuple(mean.tolist()), tuple(std.tolist())

"""Data sets of a user's own, as `module:factory`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimstart.lab.data import ArraySet, ImageData, load


def arrays(height: int = 16, width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (60, height, width, 3), dtype=np.uint8), np.arange(60) % 3


def pairs(data_dir: Path | None = None) -> Any:
    """Images that fit in memory; `--data-dir` may say how wide they are."""
    images, labels = arrays(width=12 if data_dir is None else int(data_dir.name))
    return (images[:40], labels[:40]), (torch.from_numpy(images[40:]), torch.from_numpy(labels[40:]))


def grey() -> Any:
    images, labels = arrays()
    return (images[..., 0], labels), (images[:9, ..., 0], labels[:9])


def digits() -> ArraySet:
    """Images that must not be mirrored."""
    images, labels = arrays()
    tensors = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels)
    return ArraySet("digits", 3, tensors, tensors, mean=(0.5,) * 3, std=(0.25,) * 3, padding=0, flip=False)


def batches(**settings: Any) -> ImageData:
    """Batches of one's own: here those of the embedded set."""
    return load("fashion", batch_size=settings["batch_size"], seed=settings["seed"], device=settings["device"])


def own_batches(batch_size: int) -> ImageData:
    return load("fashion", batch_size=batch_size)


def wrong() -> Any:
    return 42


def uneven() -> Any:
    images, labels = arrays()
    return (images, labels[:5]), (images, labels)


def unequal() -> Any:
    return arrays(), arrays(height=17)


def empty() -> Any:
    images, labels = arrays()
    return (images, labels), (images[:0], labels[:0])


def failing() -> Any:
    raise OSError("the disk is on fire")


def leaving():
    raise SystemExit(0)

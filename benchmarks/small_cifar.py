"""The first 10,000 training images of CIFAR-10 and CIFAR-100, for studies on a CPU, and all test images.

    slimstart train --data benchmarks.small_cifar:cifar100 --data-dir FOLDER ...

with the `cifar10.npz` or `cifar100.npz` of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

NUM_TRAINING_IMAGES = 10_000


def cifar10(data_dir: str) -> Any:
    return _first(Path(data_dir) / "cifar10.npz")


def cifar100(data_dir: str) -> Any:
    return _first(Path(data_dir) / "cifar100.npz")


def _first(path: Path) -> Any:
    with np.load(path) as arrays:
        train = arrays["train_images"][:NUM_TRAINING_IMAGES], arrays["train_labels"][:NUM_TRAINING_IMAGES]
        return train, (arrays["test_images"], arrays["test_labels"])

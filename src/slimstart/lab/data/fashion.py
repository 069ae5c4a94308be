"""A part of Fashion-MNIST, embedded: a real data set without a download, for first steps and for tests.

28 x 28 grey images of clothes in 10 classes: the first 600 of each class of the 60,000 training images and the first
200 of each of the 10,000 test images, in their original order (`scripts/embed_fashion.py`). Accuracies on it are not
those of the whole data set.

Fashion-MNIST is by Han Xiao, Kashif Rasul and Roland Vollgraf ("Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms", 2017), copyright 2017 Zalando SE, under the MIT licence: `LICENSE-fashion-mnist`.
"""

from __future__ import annotations

import io
from importlib.resources import files

import numpy as np

from slimstart.lab.data.arrays import ArraySet, as_tensors

FILE = "fashion.npz"
NUM_CLASSES = 10


def read() -> ArraySet:
    """The embedded arrays."""
    content = files("slimstart.lab.data").joinpath(FILE).read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        train, test = (
            as_tensors(file[f"{part}_images"], file[f"{part}_labels"], NUM_CLASSES, FILE) for part in ("train", "test")
        )
    # Of these 6,000 training images.
    return ArraySet("fashion", NUM_CLASSES, train, test, mean=(0.2869,), std=(0.3538,), padding=2)

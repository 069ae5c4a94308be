"""A data set of your own for the program: a factory is all that it needs. From the root of the repository:

    slimstart train --model small --data examples.own_data:make --budget flops=0.2 --epochs 4

`module:factory` is imported from Python's path or the current folder. The factory may take `data_dir`, which is what
`--data-dir` says, and returns two pairs of arrays: images and labels to train on, and those to test on. Training images
are shifted and mirrored; `slimstart.lab.data.ArraySet` says otherwise.
"""

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]


def stripes(count: int, seed: int) -> Pair:
    """Noisy stripes of 28 x 28 pixels; the class is their width, one of four."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 4
    phases = 2 * np.pi * random.random((count, 1, 1))
    waves = np.sin(np.arange(28) * (0.4 + 0.3 * labels[:, None, None]) + phases)
    noisy = 128 + 60 * waves + 40 * random.standard_normal((count, 28, 28))
    return noisy.clip(0, 255).astype(np.uint8), labels


def make() -> tuple[Pair, Pair]:
    return stripes(2000, seed=0), stripes(500, seed=1)

"""Write the part of Fashion-MNIST that the package carries, from the four original files.

python scripts/embed_fashion.py FOLDER [OUT.npz]

FOLDER holds train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two of t10k. The first images of each class
are taken, in their original order. The same input gives the same file: an archive's dates are fixed.
"""

from __future__ import annotations

import gzip
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

from slimstart.io import atomic
from slimstart.lab.data import fashion

OUT = Path(fashion.__file__).with_name(fashion.FILE)
PER_CLASS = {"train": 600, "t10k": 200}
DATE = (2017, 8, 25, 0, 0, 0)  # of the original's publication


def part(folder: Path, name: str, per_class: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `per_class` images of each class, and their labels."""
    images = np.frombuffer(gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    chosen = np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in range(fashion.NUM_CLASSES)])
    chosen.sort()
    return images.reshape(-1, 28, 28)[chosen], labels[chosen]


def archive(arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz as `numpy.savez_compressed` writes it, but with fixed dates."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", DATE)
            file.writestr(info, member.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)
    return content.getvalue()


def main(folder: Path, out: Path = OUT) -> None:
    """Read, choose, write."""
    train = part(folder, "train", PER_CLASS["train"])
    test = part(folder, "t10k", PER_CLASS["t10k"])
    names = ("train_images", "train_labels", "test_images", "test_labels")
    atomic.write(out, archive(dict(zip(names, (*train, *test), strict=True))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

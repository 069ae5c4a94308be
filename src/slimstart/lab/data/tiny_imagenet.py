"""Sixteen classes of Tiny ImageNet: 64 x 64 photographs, 500 of each class for training and 50 for testing.

Read from `tinyimagenet16.npz` in `data_dir`, or as `data_dir` itself: the original JPEG files in one array. All share
one of two headers (colour or grey), which is stored once; `scans` are the files without it, concatenated, and
`lengths`, `labels`, `grey` and `val` have one entry per image. The images are decoded once, when the set is loaded.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from slimstart.errors import DataError
from slimstart.lab.data import npz
from slimstart.lab.data.arrays import ArraySet, as_tensors

FILE = "tinyimagenet16.npz"
NUM_CLASSES = 16
_SIDE = 64
_MAX_IMAGES = NUM_CLASSES * (500 + 50)
_MAX_BYTES = {
    **dict.fromkeys(("header_colour", "header_grey"), 1 << 16),
    "scans": _MAX_IMAGES << 14,
    **dict.fromkeys(("lengths", "labels", "grey", "val"), 8 * _MAX_IMAGES),
}


def read(data_dir: Path) -> ArraySet:
    """The decoded arrays.

    Raises:
        DataError: the file is not there, truncated or corrupt.
    """
    path = data_dir if data_dir.is_file() else data_dir / FILE
    if not path.is_file():
        raise DataError(f"tiny_imagenet16 is not in {data_dir}: put {FILE} there, or point --data-dir to where it is")
    arrays = npz.read(path, _MAX_BYTES)
    if odd := [name for name, array in arrays.items() if array.ndim != 1 or array.dtype.kind not in "uib"]:
        raise DataError(f"{path} has no rows of whole numbers as {', '.join(odd)}: it is damaged")
    labels, grey, test = arrays["labels"], arrays["grey"], arrays["val"].astype(bool)
    headers, scans = (arrays["header_colour"].tobytes(), arrays["header_grey"].tobytes()), arrays["scans"].tobytes()
    ends = np.cumsum(arrays["lengths"], dtype=np.int64)
    if not len(ends) == len(labels) == len(grey) == len(test) or arrays["lengths"].sum() != len(scans):
        raise DataError(f"{path} has arrays that do not fit each other: it is damaged")
    spans = zip(grey, [0, *ends[:-1]], ends, strict=True)
    try:
        with ThreadPoolExecutor() as pool:  # Pillow decodes outside of the interpreter's lock
            images = np.stack(list(pool.map(_decode, (headers[g] + scans[a:b] for g, a, b in spans))))
    except MemoryError:
        raise
    except Exception as error:  # Pillow has no one error for damaged images
        raise DataError(f"{path} holds an image that cannot be decoded: {error}") from error
    return ArraySet(
        name="tiny_imagenet16",
        num_classes=NUM_CLASSES,
        train=as_tensors(images[~test], labels[~test], NUM_CLASSES, path),
        test=as_tensors(images[test], labels[test], NUM_CLASSES, path),
        mean=(0.4754, 0.4436, 0.3806),
        std=(0.2724, 0.2601, 0.2781),
        padding=8,
    )


def _decode(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
        if image.size != (_SIDE, _SIDE):
            raise OSError(f"it has {image.width} x {image.height} pixels, not {_SIDE} x {_SIDE}")
        return np.asarray(image.convert("RGB"))

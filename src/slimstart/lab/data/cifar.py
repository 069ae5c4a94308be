"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), in any of the usual formats.

Read from the first of these that is in `data_dir`, or is `data_dir` itself:

- the folder of the python version (`cifar-10-batches-py`, `cifar-100-python`), or its `-python.tar.gz`;
- the folder of the binary version (`cifar-10-batches-bin`, `cifar-100-binary`), or its `-binary.tar.gz`;
- a `cifar10*.npz` or `cifar100*.npz` with `train_images` uint8 (N, 32, 32, 3), `train_labels`, `test_images` and
  `test_labels`; it may hold fewer images.

If none is, the python archive is downloaded. Archives are read in memory, by the names of their members. The sizes
of all files are known, and larger ones are refused before memory is used for them.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from slimstart.errors import DataError
from slimstart.io.files import open_to_read, read_bytes
from slimstart.lab.data import npz, pickles
from slimstart.lab.data.arrays import ArraySet, as_tensors
from slimstart.lab.data.download import Progress, fetch

_PIXELS = 3 * 32 * 32
_MAX_ROW = 2 * (_PIXELS + 128)  # bytes of an image, its labels and its name, in text of Python 3 at most
_MAX_MEMBERS = 1000  # of an archive

Part = tuple[np.ndarray, np.ndarray]  # images (N, 32, 32, 3) and labels (N,)


@dataclass(frozen=True)
class Format:
    """The published form of one of the two data sets."""

    name: str
    num_classes: int
    python: str  # folder in the archive of the python version
    binary: str
    train: tuple[str, ...]  # files in these folders
    test: tuple[str, ...]
    label: str  # key in a python file
    label_bytes: int  # in front of each image of a binary file; the last is the label
    url: str  # of the python archive
    md5: str
    mean: tuple[float, float, float]  # of the training images, as is std
    std: tuple[float, float, float]
    num_train: int = 50_000
    num_test: int = 10_000

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test

    def max_bytes(self, file: str) -> int:
        """Largest size of a file that holds its share of the images."""
        num_images, names = (self.num_test, self.test) if file in self.test else (self.num_train, self.train)
        return (1 << 16) + _MAX_ROW * num_images // len(names)

    @property
    def accepted(self) -> tuple[str, ...]:
        """Names of accepted files and folders besides an .npz, in order of preference."""
        archive = self.url.rpartition("/")[2]
        return self.python, archive, self.binary, archive.replace("-python", "-binary")


FORMATS: Mapping[str, Format] = {
    "cifar10": Format(
        name="cifar10",
        num_classes=10,
        python="cifar-10-batches-py",
        binary="cifar-10-batches-bin",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test=("test_batch",),
        label="labels",
        label_bytes=1,
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Format(
        name="cifar100",
        num_classes=100,
        python="cifar-100-python",
        binary="cifar-100-binary",
        train=("train",),
        test=("test",),
        label="fine_labels",
        label_bytes=2,
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def read(form: Format, data_dir: Path, *, download: bool = False, progress: Progress | None = None) -> ArraySet:
    """The arrays of `form` from `data_dir`, downloaded into it if they are not there and `download` is set.

    Raises:
        DataError: they are missing, truncated or corrupt.
    """
    source = _find(form, data_dir) or _download(form, data_dir, download, progress)
    parts = _read_arrays(form, source) if source.suffix == ".npz" else _read_files(form, source)
    train, test = (as_tensors(*part, form.num_classes, source) for part in parts)
    return ArraySet(form.name, form.num_classes, train, test, form.mean, form.std, padding=4)


def _find(form: Format, data_dir: Path) -> Path | None:
    first = form.files[0]
    if data_dir.is_file() or (data_dir / first).is_file() or (data_dir / f"{first}.bin").is_file():
        return data_dir
    named = (data_dir / name for name in form.accepted)
    # The pattern for CIFAR-10 fits cifar100.npz, too.
    arrays = (path for path in sorted(data_dir.glob("*.npz")) if re.match(rf"{form.name}(?!\d)", path.name))
    return next((path for path in (*named, *arrays) if path.exists()), None)


def _download(form: Format, data_dir: Path, download: bool, progress: Progress | None) -> Path:
    path, problem = data_dir / form.accepted[1], f"`download` is off, so {form.url} was not fetched"
    if download:
        try:
            fetch(form.url, path, form.md5, progress)
            return path
        except DataError as error:
            problem = str(error)
    raise DataError(
        f"{form.name} is not in {data_dir}, and {problem}. Put one of {', '.join(form.accepted)} or {form.name}.npz "
        "there, or point --data-dir to where one is"
    )


def _read_arrays(form: Format, path: Path) -> tuple[Part, Part]:
    sizes = {"train": form.num_train, "test": form.num_test}
    most = {
        f"{part}_{what}": n * size for part, n in sizes.items() for what, size in (("images", _PIXELS), ("labels", 8))
    }
    train_images, train_labels, test_images, test_labels = npz.read(path, most).values()
    for images in (train_images, test_images):
        if images.shape[1:] != (32, 32, 3):
            raise DataError(f"{path} has images of shape {images.shape}, not (N, 32, 32, 3)")
    return (train_images, train_labels), (test_images, test_labels)


def _read_files(form: Format, source: Path) -> tuple[Part, Part]:
    """From a folder or an archive, of the python or of the binary version."""
    contents = _from_folder(form, source) if source.is_dir() else _from_archive(form, source)
    binary = f"{form.files[0]}.bin" in contents
    suffix, parse = (".bin", _parse_binary) if binary else ("", _parse_python)
    if missing := [name for name in form.files if name + suffix not in contents]:
        raise DataError(
            f"{source} lacks {', '.join(missing)}: it is another data set, or incomplete; download it again"
        )

    def part(names: tuple[str, ...], num_images: int) -> Part:
        found = [parse(form, contents[name + suffix], f"{name + suffix} in {source}") for name in names]
        planes, labels = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        if len(planes) != num_images:
            count = f"{len(planes):,} images in {', '.join(names)}, not {num_images:,}"
            raise DataError(f"{source} is incomplete: it has {count}; download it again")
        return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels

    return part(form.train, form.num_train), part(form.test, form.num_test)


def _from_folder(form: Format, folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in form.files:
        for file in (folder / name, folder / f"{name}.bin"):
            if file.exists():
                try:
                    contents[file.name] = read_bytes(file, form.max_bytes(name))
                except (OSError, ValueError) as error:
                    raise DataError(f"{file} cannot be read: {error}; download it again") from error
    return contents


def _from_archive(form: Format, path: Path) -> dict[str, bytes]:
    members = {f"{form.python}/{name}": name for name in form.files}
    members |= {f"{form.binary}/{name}.bin": f"{name}.bin" for name in form.files}
    contents = {}
    try:
        with open_to_read(path) as packed, gzip.GzipFile(fileobj=packed) as unpacked:
            limited = _Limited(unpacked, (1 << 20) + sum(map(form.max_bytes, form.files)))
            with tarfile.open(fileobj=limited, mode="r|") as archive:  # a stream: no member can point to another
                for number, member in enumerate(archive):
                    if number >= _MAX_MEMBERS:
                        raise ValueError(f"it has more than {_MAX_MEMBERS:,} members")
                    if (name := members.get(member.name)) is not None:
                        contents[name] = _member(archive, member, form.max_bytes(name.removesuffix(".bin")))
            while limited.read(1 << 20):  # to the end, where the checksum is
                pass
    except MemoryError:  # the file may be fine
        raise
    except Exception as error:  # tarfile has no one error for damaged files
        raise DataError(f"{path} is damaged, or not a .tar.gz: {error}; remove it and download it again") from error
    return contents


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, max_bytes: int) -> bytes:
    opened = archive.extractfile(member) if member.isreg() and not member.issparse() else None
    if opened is None:
        raise ValueError(f"{member.name} is not a plain file")
    if member.size > max_bytes:
        raise ValueError(f"{member.name} has {member.size:,} bytes, more than the {max_bytes:,} of this data set")
    return opened.read()


class _Limited(io.RawIOBase):
    """A file that may be read up to a number of bytes."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, max_bytes: int) -> None:
        self._file, self._max_bytes, self._left = file, max_bytes, max_bytes

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {self._max_bytes:,} bytes")
        return content


def _parse_python(form: Format, content: bytes, source: str) -> Part:
    found = pickles.read(content, source)
    planes, labels = found.get("data"), found.get(form.label)
    if not isinstance(planes, np.ndarray) or planes.shape[1:] != (_PIXELS,):
        raise DataError(f"{source} has no rows of {_PIXELS:,} bytes as `data`: it is another data set, or damaged")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataError(f"{source} has no list of numbers as `{form.label}`: it is another data set, or damaged")
    return planes, np.array(labels, np.int64)


def _parse_binary(form: Format, content: bytes, source: str) -> Part:
    row = form.label_bytes + _PIXELS
    if len(content) % row:
        raise DataError(f"{source} has {len(content):,} bytes, which is no multiple of {row:,}; download it again")
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    return rows[:, form.label_bytes :], rows[:, form.label_bytes - 1]

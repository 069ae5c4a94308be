"""Every reader of files raises an error of ours that names the file, and waits for nothing."""

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from slimstart.io import checkpoints, network_files
from slimstart.lab import records
from slimstart.lab.data import cifar, load, tiny_imagenet
from slimstart.lab.recipes import recipe
from slimstart.lab.reports import find
from tests.datasets import cifar_files, random_arrays, small_cifar, write_image_folder
from tests.memory import measure
from tests.saved_networks import with_header

FORM = small_cifar("cifar10")
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "checkpoint": ("file.pt", checkpoints.read),
    "network": ("file.safetensors", lambda path: network_files.load(path, lambda: nn.Conv2d(3, 4, 1))),
    "record": ("record.json", records.read),
    "records in a folder": ("record.json", lambda path: find([path.parent])),
    "recipe": ("file.toml", recipe.read),
    "CIFAR archive": ("cifar-10-python.tar.gz", lambda path: cifar.read(FORM, path)),
    "CIFAR folder": ("data_batch_2", lambda path: cifar.read(FORM, path.parent)),
    "CIFAR arrays": ("cifar10.npz", lambda path: cifar.read(FORM, path)),
    "Tiny ImageNet": ("tinyimagenet16.npz", tiny_imagenet.read),
}


def check(name: str, path: Path) -> None:
    found = measure(READERS[name][1], path, timeout=10)
    assert found.is_ours, found
    assert path.name in found.message
    assert len(found.message) < 2000


@pytest.mark.parametrize("name", READERS)
def test_a_pipe(name: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[name][0]
    os.mkfifo(path)
    if name == "CIFAR folder":
        (tmp_path / "data_batch_1").write_bytes(b"")
    check(name, path)


@pytest.mark.parametrize("name", ["network", "record", "records in a folder", "recipe"])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"x = " + b"[" * 100_000,
        b"x = " + b"[" * 30_000,
        b"[" + b"a." * 16_000 + b"b]",
        b"[" + b"a." * 400_000 + b"b]",  # of which each level is looked up from the first on
        b"\xff\xfe",
        b'{"schema": ' + b"9" * 5000,
    ],
)
def test_deep_and_odd_text(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / READERS[name][0]
    path.write_bytes(with_header(content) if name == "network" else content)
    check(name, path)


def test_an_image_that_is_a_pipe(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    os.mkfifo(tmp_path / "val" / "a" / "x.png")
    data = load("image_folder", data_dir=tmp_path, batch_size=4, image_size=16)
    found = measure(lambda: list(data.test.epoch(0)), timeout=10)
    assert (found.error, "val/a/x.png cannot be decoded" in found.message) == ("DataError", True), found


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
@pytest.mark.parametrize("target", ["cifar-10-batches-py/data_batch_1", "data_batch_1", "/etc/passwd", "missing"])
def test_archives_with_odd_members(kind: bytes, target: str, tmp_path: Path) -> None:
    """Links to others, to themselves and to nothing."""
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in cifar_files(FORM, random_arrays(FORM), binary=False).items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            if name == "data_batch_1":
                member.type, member.linkname = kind, target
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    check("CIFAR archive", path)


@pytest.mark.parametrize("way", ["encrypted", "compressed otherwise", "of names", "without a shape", "a folder"])
def test_odd_arrays(way: str, tmp_path: Path) -> None:
    path, arrays = tmp_path / "cifar10.npz", random_arrays(FORM)
    if way == "of names":
        arrays["test_labels"] = np.zeros(10, [("né", "i8")])
    np.savez(path, **arrays)
    content = bytearray(path.read_bytes())
    if way == "encrypted":
        for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            content[content.index(signature) + at] |= 1
    path.write_bytes(content)
    if way in ("compressed otherwise", "without a shape", "a folder"):
        kind = zipfile.ZIP_BZIP2 if way == "compressed otherwise" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", kind) as archive:
            name = "train_images.npy/" if way == "a folder" else "train_images.npy"
            archive.writestr(name, b"\x93NUMPY\x01\x00\x10\x00{'shape': (1,)}  ")
    check("CIFAR arrays", path)

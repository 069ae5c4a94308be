"""Small data sets in the file formats of the real ones, and the location of the real CIFAR-10."""

import atexit
import dataclasses
import functools
import importlib.util
import io
import os
import pickle
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slimstart.lab.data import cifar

Arrays = dict[str, np.ndarray]


@functools.cache
def real_cifar10() -> Path:
    """The path of CIFAR-10: `SLIMSTART_CIFAR10`, or a file written once per run from its packed parts."""
    if place := os.environ.get("SLIMSTART_CIFAR10"):
        return Path(place)
    packed = Path(__file__).parents[1] / ".." / "shared" / "data"
    spec = importlib.util.spec_from_file_location("load_cifar10", packed / "load_cifar10.py")
    if not (packed / "load_cifar10.py").exists() or spec is None or spec.loader is None:
        pytest.skip("CIFAR-10 is neither where SLIMSTART_CIFAR10 says nor in ../shared/data beside the repository")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = Path(tempfile.mkdtemp(prefix="cifar10-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    np.savez(folder / "cifar10.npz", **module.load(str(packed)))
    return folder / "cifar10.npz"


def small_cifar(name: str, **changes: Any) -> cifar.Format:
    """The format of the real one, with 50 training and 10 test images."""
    return dataclasses.replace(cifar.FORMATS[name], num_train=50, num_test=10, **changes)


def random_arrays(form: cifar.Format, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    arrays = {}
    for part, count in (("train", form.num_train), ("test", form.num_test)):
        arrays[f"{part}_images"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = random.integers(0, form.num_classes, count)
    return arrays


def cifar_files(form: cifar.Format, arrays: Arrays, *, binary: bool) -> dict[str, bytes]:
    """The files of the python or the binary version, by name. A python dict is written as Python 2 would read it."""
    files = {}
    for part, names in (("train", form.train), ("test", form.test)):
        images = np.split(arrays[f"{part}_images"], len(names))
        labels = np.split(arrays[f"{part}_labels"], len(names))
        for name, some, their in zip(names, images, labels, strict=True):
            planes = some.transpose(0, 3, 1, 2).reshape(len(some), 3072)
            if binary:
                coarse = [[7]] * len(some) if form.label_bytes == 2 else [[]] * len(some)
                rows = (bytes([*c, label]) + row.tobytes() for c, label, row in zip(coarse, their, planes, strict=True))
                files[f"{name}.bin"] = b"".join(rows)
            else:
                content = {b"batch_label": b"batch", b"data": planes, form.label.encode(): their.tolist()}
                files[name] = pickle.dumps(content, protocol=2)
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(path: Path, prefix: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{prefix}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Smooth random colours, which JPEG preserves; every seed gives another image."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def write_image_folder(root: Path, num_train: int = 6, num_test: int = 3, classes: str = "abc") -> None:
    """`train` and `val` with one folder per letter; sizes, shapes and formats differ."""
    formats = ("jpeg", "png", "JPG", "bmp", "webp")
    seed = 0
    for part, count in (("train", num_train), ("val", num_test)):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                image = photograph(40 + 7 * i, 60 - 5 * i, seed := seed + 1)
                image.save(root / part / name / f"{i}.{formats[i % len(formats)]}")


def write_tiny_imagenet(path: Path, images: list[Image.Image], labels: list[int], val: list[int]) -> None:
    """JPEG files in one archive, without their headers; all images of a mode have the same header."""
    headers, scans, grey = {"RGB": b"", "L": b""}, [], []
    for image in images:
        content = io.BytesIO()
        image.save(content, "JPEG", quality=90)
        cut = content.getvalue().index(b"\xff\xda")
        headers[image.mode] = content.getvalue()[:cut]
        scans.append(content.getvalue()[cut:])
        grey.append(image.mode == "L")
    np.savez(
        path,
        header_colour=np.frombuffer(headers["RGB"], np.uint8),
        header_grey=np.frombuffer(headers["L"], np.uint8),
        scans=np.frombuffer(b"".join(scans), np.uint8),
        lengths=np.array([len(scan) for scan in scans]),
        labels=np.array(labels),
        grey=np.array(grey, np.uint8),
        val=np.array(val, np.uint8),
    )

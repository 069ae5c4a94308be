"""CIFAR in all its file formats, complete and damaged; all sets here have 50 training and 10 test images."""

import dataclasses
import gzip
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slimstart.errors import DataError
from slimstart.lab.data import cifar, load
from slimstart.lab.data.arrays import ArraySet
from tests.datasets import (
    Arrays,
    cifar_files,
    random_arrays,
    real_cifar10,
    small_cifar,
    write_archive,
    write_folder,
)


def check(found: ArraySet, arrays: Arrays) -> None:
    for part, (images, labels) in (("train", found.train), ("test", found.test)):
        assert images.dtype == torch.uint8
        assert images.permute(0, 2, 3, 1).numpy().tobytes() == arrays[f"{part}_images"].tobytes()
        assert labels.tolist() == arrays[f"{part}_labels"].tolist()


def python_folder(path: Path, form: cifar.Format, arrays: Arrays) -> Path:
    write_folder(path / form.python, cifar_files(form, arrays, binary=False))
    return path / form.python


def binary_folder(path: Path, form: cifar.Format, arrays: Arrays) -> Path:
    write_folder(path / form.binary, cifar_files(form, arrays, binary=True))
    return path / form.binary


def python_archive(path: Path, form: cifar.Format, arrays: Arrays) -> Path:
    place = path / f"{form.name.replace('cifar', 'cifar-')}-python.tar.gz"
    write_archive(place, form.python, {"batches.meta": b"not read", **cifar_files(form, arrays, binary=False)})
    return place


def binary_archive(path: Path, form: cifar.Format, arrays: Arrays) -> Path:
    place = path / f"{form.name.replace('cifar', 'cifar-')}-binary.tar.gz"
    write_archive(place, form.binary, cifar_files(form, arrays, binary=True))
    return place


def npz(path: Path, form: cifar.Format, arrays: Arrays) -> Path:
    np.savez(path / f"{form.name}_copy.npz", **arrays)
    return path / f"{form.name}_copy.npz"


Write = Callable[[Path, cifar.Format, Arrays], Path]
FORMS: tuple[Write, ...] = (python_folder, binary_folder, python_archive, binary_archive, npz)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("write", FORMS)
def test_every_form_gives_the_same_arrays(write: Write, name: str, tmp_path: Path) -> None:
    form = small_cifar(name)
    arrays = random_arrays(form)
    place = write(tmp_path, form, arrays)
    for data_dir in (tmp_path, place):
        found = cifar.read(form, data_dir)
        check(found, arrays)
        assert (found.name, found.num_classes, found.padding) == (name, form.num_classes, 4)


def test_an_archive_may_have_any_name(tmp_path: Path) -> None:
    form = small_cifar("cifar10")
    arrays = random_arrays(form)
    for write in (python_archive, binary_archive):
        check(cifar.read(form, write(tmp_path, form, arrays).rename(tmp_path / "mine.tgz")), arrays)


def test_cifar10_and_cifar100_files_are_distinguished(tmp_path: Path) -> None:
    for name in ("cifar100", "cifar10"):
        form = small_cifar(name)
        with pytest.raises(DataError, match=f"{name} is not in"):
            cifar.read(form, tmp_path)
        npz(tmp_path, form, random_arrays(form))
        check(cifar.read(form, tmp_path), random_arrays(form))


def test_the_public_loader_takes_an_npz(tmp_path: Path) -> None:
    arrays = random_arrays(small_cifar("cifar10"))
    data = load("cifar10", data_dir=npz(tmp_path, small_cifar("cifar10"), arrays), batch_size=20, validation=8)
    assert (data.name, data.num_classes, data.image_shape) == ("cifar10", 10, (3, 32, 32))
    assert (data.train.num_images, data.test.num_images, len(data.train)) == (42, 8, 2)


def test_missing_data_are_reported_with_the_accepted_files(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load("cifar10", data_dir=tmp_path, batch_size=1, download=False)
    message = str(caught.value)
    for part in (
        *("cifar10 is not in", str(tmp_path), "`download` is off", "--data-dir", "cifar10.npz"),
        *("cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("write", [python_archive, binary_archive, npz])
def test_a_truncated_file_is_named(write: Write, tmp_path: Path) -> None:
    form = small_cifar("cifar10")
    place = write(tmp_path, form, random_arrays(form))
    whole = place.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        place.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"{place.name} is damaged, or not an? \.(npz|tar\.gz)"):
            cifar.read(form, tmp_path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """By the checksum of the archive, wherever the bit is."""
    form = small_cifar("cifar10")
    for place in (python_archive(tmp_path, form, random_arrays(form)), npz(tmp_path, form, random_arrays(form))):
        content = bytearray(place.read_bytes())
        content[len(content) // 2] ^= 1
        place.write_bytes(content)
        with pytest.raises(DataError, match=f"{place.name} is damaged"):
            cifar.read(form, place)


def test_incomplete_sets_are_refused(tmp_path: Path) -> None:
    form = small_cifar("cifar10")
    arrays = random_arrays(form)
    for write, suffix in ((python_folder, ""), (binary_folder, ".bin")):
        folder = write(tmp_path, form, arrays)
        (folder / f"data_batch_3{suffix}").unlink()
        with pytest.raises(DataError, match=f"{folder.name} lacks data_batch_3: .* download it again"):
            cifar.read(form, folder)
    larger = dataclasses.replace(form, num_train=60)
    with pytest.raises(
        DataError, match=r"is incomplete: it has 50 images in data_batch_1, .*, not 60; download it again"
    ):
        cifar.read(larger, python_archive(tmp_path, form, arrays))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    form, other = small_cifar("cifar10"), small_cifar("cifar100")
    binary, python = (write(tmp_path, form, random_arrays(form)) for write in (binary_folder, python_folder))
    (binary / "test_batch.bin").write_bytes((binary / "test_batch.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"test_batch\.bin in .* has 30,729 bytes, which is no multiple of 3,073"):
        cifar.read(form, binary)
    for content, message in (
        ({"labels": [0]}, "test_batch in .* has no rows of 3,072 bytes as `data`"),
        ({"data": np.zeros((1, 5), np.uint8), "labels": [0]}, "has no rows of 3,072 bytes as `data`"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["0"]}, "has no list of numbers as `labels`"),
        ({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [0]}, "has no list of numbers as `labels`"),
        ({"data": np.zeros((10, 3072), np.uint8), "labels": [10] * 10}, "labels from 10 to 10, not from 0 to 9"),
    ):
        (python / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(DataError, match=message):
            cifar.read(form, python)
    (python / "test_batch").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"test_batch in .* is not a batch of CIFAR"):
        cifar.read(form, python)
    with pytest.raises(DataError, match=r"labels from 0 to \d\d, not from 0 to 9"):
        cifar.read(form, npz(tmp_path, other, random_arrays(other)))


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    form = small_cifar("cifar10")
    arrays = random_arrays(form)
    np.savez(tmp_path / "a.npz", **{**arrays, "test_images": arrays["test_images"].transpose(0, 3, 1, 2)})
    with pytest.raises(DataError, match=r"a\.npz has images of shape \(10, 3, 32, 32\), not \(N, 32, 32, 3\)"):
        cifar.read(form, tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=arrays["train_images"])
    with pytest.raises(DataError, match=r"b\.npz is damaged, or not an \.npz with train_images, train_labels"):
        cifar.read(form, tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{**arrays, "test_labels": np.array([None] * 10)})
    with pytest.raises(DataError, match="allow_pickle=False"):
        cifar.read(form, tmp_path / "c.npz")


def test_nothing_is_extracted(tmp_path: Path) -> None:
    """Not even a member that points out of the archive."""
    form = small_cifar("cifar10")
    place = tmp_path / "in" / "cifar-10-python.tar.gz"
    place.parent.mkdir()
    files = cifar_files(form, random_arrays(form), binary=False)
    write_archive(place, form.python, {"../../outside": b"x", **files})
    check(cifar.read(form, place.parent), random_arrays(form))
    assert [path.name for path in tmp_path.rglob("*")] == ["in", place.name]
    assert gzip.decompress(place.read_bytes()).count(b"outside") == 1


@pytest.mark.slow
def test_the_real_cifar10() -> None:
    """The digests are those of the published arrays; the constants are those of the training images."""
    form = cifar.FORMATS["cifar10"]
    found = cifar.read(form, real_cifar10())
    digests = [
        hashlib.md5((t.permute(0, 2, 3, 1).contiguous() if t.ndim == 4 else t).numpy().tobytes()).hexdigest()
        for t in (*found.train, *found.test)
    ]
    assert digests == [
        "17e2cb5a4119d89a4a13e02b91701bff",
        "64a7290ac3c358816975e50453f50b5c",
        "6d2714505047e13831cd876923568712",
        "c44956f095ec277e22e363b9b413ac99",
    ]
    pixels = found.train[0].transpose(0, 1).flatten(1).double() / 255
    assert pixels.mean(1).tolist() == pytest.approx(form.mean, abs=5e-5)
    assert pixels.std(1, correction=0).tolist() == pytest.approx(form.std, abs=5e-5)

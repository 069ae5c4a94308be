"""Files that claim to be large: refused before memory is used for them."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from slimstart.io import checkpoints
from slimstart.lab.data import cifar, load, pickles, tiny_imagenet
from tests.datasets import cifar_files, random_arrays, small_cifar, write_archive, write_image_folder
from tests.memory import Measured, measure

MIB = 1 << 20
FORM = small_cifar("cifar10")


def check(found: Measured, error: str, message: str, num_bytes: int = 64 * MIB) -> None:
    assert (found.error, message in found.message) == (error, True), found
    assert found.num_bytes < num_bytes
    assert found.seconds < 10


PICKLES = {
    "index of the memo": b"]r\xff\xff\xff\x03.",
    "length of a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b".",
    "length of bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 32) + b".",
    "many small objects": b"(" + b"}" * (8 * MIB) + b"t.",
    "the same text again and again": (
        b"(c_codecs\nencode\nq\x000X\x00\x00\x10\x00"
        + b"a" * MIB
        + b"q\x010X\x06\x00\x00\x00latin1q\x020"
        + b"h\x00h\x01h\x02\x86R" * 3000
        + b"t."
    ),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles(name: str) -> None:
    check(measure(pickles.read, PICKLES[name], "file"), "DataError", "file is not a batch of CIFAR")


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_an_archive_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(tarfile.TarInfo("padding").tobuf())
        for _ in range(40):
            file.write(bytes(8 * MIB))
    check(measure(cifar.read, FORM, path), "DataError", f"{path} is damaged")
    for name in ("other", "cifar-10-batches-py/data_batch_1"):
        write_tar(path, (tarfile.TarInfo(name), bytes(200 * MIB)))
        check(measure(cifar.read, FORM, path), "DataError", f"{path} is damaged", 2 * 64 * MIB)


def test_a_sparse_member(tmp_path: Path) -> None:
    member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    member.type, member.pax_headers = (
        tarfile.REGTYPE,
        {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.realsize": str(1 << 40),
            "GNU.sparse.name": member.name,
        },
    )
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", (member, b"0\n".ljust(512, b"\0")))
    check(measure(cifar.read, FORM, path), "DataError", "is not a plain file")


def test_many_members(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    write_archive(path, "x", {str(i): b"" for i in range(1500)})
    check(measure(cifar.read, FORM, path), "DataError", "more than 1,000 members")


def test_a_file_in_a_folder(tmp_path: Path) -> None:
    for name, content in cifar_files(FORM, random_arrays(FORM), binary=True).items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "data_batch_2.bin").open("ab") as file:
        file.truncate(1 << 40)
    check(measure(cifar.read, FORM, tmp_path), "DataError", f"{tmp_path}/data_batch_2.bin cannot be read: it has more")


def test_arrays(tmp_path: Path) -> None:
    arrays, path = random_arrays(FORM), tmp_path / "cifar10.npz"
    zeros = np.zeros((100_000, 32, 32, 3), np.uint8)
    np.savez_compressed(path, **{**arrays, "train_images": zeros})
    check(measure(cifar.read, FORM, path), "DataError", "train_images has 307,200,000 bytes, more than")
    np.savez_compressed(path, **{**arrays, "test_labels": np.zeros((10, 1 << 20), np.int64)})
    check(measure(cifar.read, FORM, path), "DataError", "test_labels has 83,886,080 bytes, more than the 80 of")
    np.savez(path, **arrays)
    for shape in ("(99999999999999,)", "(-1,)", "(9, 0)"):
        with zipfile.ZipFile(path, "w") as archive:
            header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            archive.writestr("train_images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.encode())
        check(measure(cifar.read, FORM, path), "DataError", f"{path} is damaged")
    np.savez_compressed(tmp_path / tiny_imagenet.FILE, header_colour=np.zeros(1 << 27, np.uint8))
    check(measure(tiny_imagenet.read, tmp_path), "DataError", "header_colour has 134,217,728 bytes, more than")


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compress(bytes((width + 1) * 100), 1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [(13_000, 13_000, "more than 89,478,485"), (9_000, 9_000, "it claims 9000 x 9000 pixels in")],
)
def test_images(tmp_path: Path, width: int, height: int, message: str) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "val" / "b" / "x.png").write_bytes(png(width, height))
    data = load("image_folder", data_dir=tmp_path, batch_size=4, image_size=16)
    check(measure(lambda: list(data.test.epoch(0))), "DataError", "val/b/x.png cannot be decoded: it")
    assert message in measure(lambda: list(data.test.epoch(0))).message


def test_a_packed_checkpoint(tmp_path: Path) -> None:
    """With the right checksum, which is no secret."""
    plain, path = io.BytesIO(), tmp_path / "packed.pt"
    torch.save({"weight": torch.zeros(300 * MIB // 4)}, plain)
    packed = io.BytesIO()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    content = packed.getvalue()
    digest = hashlib.blake2b(content, digest_size=32).hexdigest()
    path.write_bytes(content + b"\nslimstart blake2b " + digest.encode())
    del plain
    check(measure(checkpoints.read, path), "CheckpointError", f"'{path}' cannot be read as a checkpoint: it unpacks to")


def test_a_refused_checkpoint_does_not_advise_to_execute_it(tmp_path: Path) -> None:
    checkpoints.write({"path": Path("x"), "call": np.random.default_rng}, tmp_path / "file.pt")
    found = measure(checkpoints.read, tmp_path / "file.pt")
    check(found, "CheckpointError", "holds more than tensors and plain values")
    assert "weights_only" not in found.message


def test_what_is_measured() -> None:
    """Otherwise the tests above would prove nothing."""
    found = measure(lambda: pickle.loads(b"}r\xff\xff\xff\x03."))
    assert found.num_bytes > 256 * MIB
    assert measure(lambda: np.ones(200 * MIB, np.uint8)).num_bytes >= 200 * MIB

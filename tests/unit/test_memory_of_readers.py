"""Files that claim to be large: refused before memory is used for them."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import slimstart
from slimstart.io import checkpoints
from slimstart.lab.data import cifar, load, pickles, tiny_imagenet
from tests.datasets import cifar_files, random_arrays, small_cifar, write_archive, write_image_folder
from tests.memory import Measured, measure
from tests.saved_networks import with_header
from tests.zoo import ZOO

MIB = 1 << 20
NETWORK = ZOO["resnet_basic"]
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def write_pickle(path: Path, content: bytes) -> None:
    """A checkpoint with this pickle, and with the right checksum."""
    plain, changed = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.zeros(16)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    body = changed.getvalue()
    digest = hashlib.blake2b(body, digest_size=32).hexdigest()
    path.write_bytes(body + b"\nslimstart blake2b " + digest.encode())


NUMBERS = [b"X\x05\x00\x00\x00%05dK\x00" % number for number in range(50_000)]
PAIRS = b"](" + b"\x86".join(NUMBERS) + b"\x86e"
ENTRIES = b"}(" + b"".join(NUMBERS) + b"u"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ"
TEXT = b"X\x00\x00\x10\x00" + b"a" * MIB
CHECKPOINTS = {
    "a bytearray": b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", 1 << 28) + b"\x85R.",
    "a tensor of any size": b"\x80\x02ctorch\nFloatTensor\nJ" + struct.pack("<i", 1 << 26) + b"\x85R.",
    "a tensor larger than its data": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(%bK\x00(M\xff\xffM\xff\xfft(K\x00K\x00t\x89" % STORAGE
        + b"ccollections\nOrderedDict\n)RtR."
    ),
    "copies of a dict": (
        b"\x80\x02](ccollections\nOrderedDict\nq\x00%bq\x01\x85R" % PAIRS + b"h\x00h\x01\x85R" * 40 + b"e."
    ),
    "attributes of a dict": (
        b"\x80\x02](ccollections\nOrderedDict\nq\x00)R%bq\x01b" % ENTRIES + b"h\x00)Rh\x01b" * 40 + b"e."
    ),
    "the same text again and again": (
        b"\x80\x02](c_codecs\nencode\nq\x00%bq\x01X\x06\x00\x00\x00latin1q\x02\x86R" % TEXT
        + b"h\x00h\x01h\x02\x86R" * 200
        + b"e."
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_pickles_in_a_checkpoint(name: str, tmp_path: Path) -> None:
    """`torch.load(weights_only=True)` reads each of these files."""
    write_pickle(tmp_path / "file.pt", CHECKPOINTS[name])
    with (tmp_path / "file.pt").open("rb") as file:
        assert torch.load(file, weights_only=True) is not None
    found = measure(checkpoints.read, tmp_path / "file.pt")
    check(found, "CheckpointError", "holds more than tensors and plain values")


def test_data_that_is_shorter_than_the_pickle_says(tmp_path: Path) -> None:
    """CVE-2026-24747: before 2.10, PyTorch reads memory beyond it."""
    tensor = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(%bK\x00K\x10\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR."
    )
    write_pickle(tmp_path / "file.pt", tensor % STORAGE)
    assert checkpoints.read(tmp_path / "file.pt").shape == (16,)  # type: ignore[attr-defined]
    for wrong in (STORAGE.replace(b"K\x10", b"K\x11"), STORAGE.replace(b"Float", b"Double")):
        write_pickle(tmp_path / "file.pt", tensor % wrong)
        found = measure(checkpoints.read, tmp_path / "file.pt")
        check(found, "CheckpointError", "holds more than tensors and plain values")


def test_plain_values_and_tensors_are_read(tmp_path: Path, differences: Callable[[Any, Any], list[str]]) -> None:
    kinds = (
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.uint16,
        torch.bool,
        torch.complex64,
    )
    state = {
        "kinds": [torch.ones(3).to(kind) for kind in kinds],
        "views": (torch.arange(12.0).view(3, 4).T, torch.arange(12.0)[::5], torch.zeros(()), torch.zeros(0, 3)),
        "values": [1, 2**70, -1, 2.5, float("inf"), None, True, "text", (), {}, {3: {"x": [[]]}}, torch.float32],
        "again": [(0.9, 0.999)] * 2,
    }  # fmt: skip
    checkpoints.write(state, tmp_path / "file.pt")
    assert differences(checkpoints.read(tmp_path / "file.pt"), state) == []


def test_a_network_that_is_larger_than_the_dense_one(tmp_path: Path) -> None:
    """Files with a hole take no space on a disk."""
    path, network = tmp_path / "net.safetensors", NETWORK.factory()
    graph = slimstart.trace(network, NETWORK.example_inputs(), "stream")
    slimstart.save(slimstart.compact(network, graph.select(torch.ones(graph.num_units, dtype=torch.bool))), path)
    assert isinstance(slimstart.load(path, NETWORK.factory), nn.Module)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    check(
        measure(slimstart.load, path, NETWORK.factory), "CheckpointError", f"'{path}' cannot be read: it has more than"
    )
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    check(measure(checkpoints.read, path), "CheckpointError", "its checksum is wrong")


def test_a_header_that_is_larger_than_the_structure(tmp_path: Path) -> None:
    """The file is smaller than that of the dense network."""
    path = tmp_path / "net.safetensors"
    path.write_bytes(with_header(b'{"odd": [' + b"[]," * (8 * MIB) + b"[]]}"))
    found = measure(slimstart.load, path, lambda: nn.Linear(2000, 1000))
    check(found, "CheckpointError", f"'{path}' cannot be read: its header has more than")


def tiff(tile: int) -> bytes:
    """An image of 64 x 64 pixels in one tile, which unpacks to many more."""
    packed = zlib.compress(bytes(tile * tile), 9)
    values = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 134, 325: len(packed)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    return b"II*\0" + struct.pack("<IH", 8, len(values)) + entries + bytes(4) + packed


@pytest.mark.parametrize(("tile", "refused"), [(64, False), (16_000, True)])
def test_tiles(tile: int, refused: bool, tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "val" / "b" / "x.tiff").write_bytes(tiff(tile))
    data = load("image_folder", data_dir=tmp_path, batch_size=4, image_size=16)
    found = measure(lambda: list(data.test.epoch(0)))
    if refused:
        check(found, "DataError", "val/b/x.tiff cannot be decoded: it has 16000 x 16000 pixels")
    else:
        check(found, "", "")


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

"""Every reader of files against changed inputs: one error of ours, in bounded time and memory."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import json
import re
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slimstart
from slimstart.io import checkpoints
from slimstart.lab import records
from slimstart.lab.data import cifar, load, tiny_imagenet
from slimstart.lab.data.download import fetch
from slimstart.lab.recipes import recipe
from tests.datasets import (
    cifar_files,
    photograph,
    random_arrays,
    small_cifar,
    write_archive,
    write_folder,
    write_image_folder,
    write_tiny_imagenet,
)
from tests.memory import Measured, measure
from tests.records import make
from tests.saved_networks import sealed, structure_of, with_structure
from tests.zoo import ZOO

FORM = small_cifar("cifar10")
NETWORK = ZOO["resnet_basic"]
MIB = 1 << 20
TRIALS = 60


@dataclasses.dataclass(frozen=True)
class Reader:
    """A valid file, its reader, and what may be put into it."""

    file: Path
    read: Callable[[], Any]
    seal: Callable[[bytes], bytes] = bytes  # repairs checksums, which are no secret
    has_values: bool = False  # a change may give another valid file


def checkpoint(root: Path) -> Reader:
    path = root / "training.pt"
    checkpoints.write({"weight": torch.randn(40, 40), "steps": 3, "names": ["a", "b"], "nested": {"x": None}}, path)
    return Reader(path, lambda: checkpoints.read(path), has_values=True)


def sealed_checkpoint(root: Path) -> Reader:
    def seal(content: bytes) -> bytes:
        body = content.rpartition(b"\nslimstart blake2b ")[0] or content
        return body + b"\nslimstart blake2b " + hashlib.blake2b(body, digest_size=32).hexdigest().encode()

    return dataclasses.replace(checkpoint(root), seal=seal)


def saved_network(root: Path) -> Path:
    torch.manual_seed(0)
    path, model = root / "net.safetensors", NETWORK.factory()
    graph = slimstart.trace(model, NETWORK.example_inputs(), "filter")
    mask = torch.rand(graph.num_units) < 0.5
    slimstart.save(slimstart.compact(model, graph.select(graph.costs.at_least_one(mask))), path)
    return path


def network(root: Path) -> Reader:
    path = saved_network(root)
    return Reader(path, lambda: slimstart.load(path, NETWORK.factory), has_values=True)  # padding of the header


def sealed_network(root: Path) -> Reader:
    def seal(content: bytes) -> bytes:
        try:
            return sealed(content)
        except Exception:  # then there is nothing to seal
            return content

    return dataclasses.replace(network(root), seal=seal)


def structure(root: Path) -> Reader:
    """The same, where only the structure is changed."""
    whole = sealed_network(root)
    content, path = whole.file.read_bytes(), root / "structure"
    path.write_text(json.dumps(structure_of(content)))

    def read() -> Any:
        whole.file.write_bytes(whole.seal(with_structure(content, path.read_bytes().decode(errors="replace"))))
        return whole.read()

    return Reader(path, read, has_values=True)


def record(root: Path) -> Reader:
    path = root / "record.json"
    records.write(make(epochs=3), path)
    return Reader(path, lambda: records.read(path), has_values=True)


def old_record(root: Path) -> Reader:
    path = root / "record.json"
    path.write_text(json.dumps(dataclasses.asdict(make(epochs=3))))
    return Reader(path, lambda: records.read(path), has_values=True)


def toml(root: Path) -> Reader:
    path = root / "recipe.toml"
    path.write_text(recipe.as_toml(recipe.Recipe()))
    return Reader(path, lambda: recipe.read(path), has_values=True)


def archive(root: Path) -> Reader:
    path = root / "cifar-10-python.tar.gz"
    write_archive(path, FORM.python, cifar_files(FORM, random_arrays(FORM), binary=False))
    return Reader(path, lambda: cifar.read(FORM, path), has_values=True)


def tar(root: Path) -> Reader:
    """The same, changed before it is compressed."""
    packed, path = archive(root), root / "plain"
    path.write_bytes(gzip.decompress(packed.file.read_bytes()))

    def read() -> Any:
        packed.file.write_bytes(gzip.compress(path.read_bytes(), 1))
        return packed.read()

    return Reader(path, read, has_values=True)


def batch(root: Path) -> Reader:
    write_folder(root / "batches", cifar_files(FORM, random_arrays(FORM), binary=False))
    return Reader(root / "batches" / "data_batch_1", lambda: cifar.read(FORM, root / "batches"), has_values=True)


def arrays(root: Path) -> Reader:
    np.savez_compressed(root / "cifar10.npz", **random_arrays(FORM))
    return Reader(root / "cifar10.npz", lambda: cifar.read(FORM, root / "cifar10.npz"), has_values=True)


def packed_images(root: Path) -> Reader:
    path = root / tiny_imagenet.FILE
    write_tiny_imagenet(path, [photograph(64, 64, i) for i in range(4)], labels=[0, 3, 1, 2], val=[0, 1, 0, 1])
    return Reader(path, lambda: tiny_imagenet.read(root), has_values=True)


def images(extension: str) -> Callable[[Path], Reader]:
    def build(root: Path) -> Reader:
        write_image_folder(root)
        path = root / "val" / "b" / f"x.{extension}"
        photograph(90, 70, 0).save(path)
        data = load("image_folder", data_dir=root, batch_size=4, image_size=16)
        return Reader(path, lambda: list(data.test.epoch(0)), has_values=True)

    return build


READERS: dict[str, Callable[[Path], Reader]] = {
    "checkpoint": checkpoint,
    "checkpoint, sealed": sealed_checkpoint,
    "network": network,
    "network, sealed": sealed_network,
    "structure": structure,
    "record": record,
    "old record": old_record,
    "recipe": toml,
    "CIFAR archive": archive,
    "CIFAR tar": tar,
    "CIFAR batch": batch,
    "arrays": arrays,
    "packed images": packed_images,
    **{extension: images(extension) for extension in ("png", "jpg", "webp", "gif", "bmp", "tiff", "ppm")},
}
ODD = [
    b"\x00",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"9" * 30,
    b"-1",
    b"[" * 3000,
    b"{",
    b'"',
    b"NaN",
    b"\n",
    b"\x1b[2J",
]


def mutated(whole: bytes, random: np.random.Generator) -> bytes:
    """A copy with a few flipped bits, removed, repeated or odd parts, or another end."""
    content = bytearray(whole)
    for _ in range(int(random.integers(1, 4))):
        at, length = int(random.integers(len(content) + 1)), int(random.integers(1, 64))
        way = int(random.integers(6))
        if way == 0 and at < len(content):
            content[at] ^= 1 << int(random.integers(8))
        elif way == 1:
            del content[at : at + length]
        elif way == 2:
            content[at:at] = content[at : at + length]
        elif way == 3:
            odd = ODD[int(random.integers(len(ODD)))]
            content[at : at + len(odd)] = odd
        elif way == 4:
            numbers = list(re.finditer(rb"\d+", content[:4096]))
            if numbers:
                found = numbers[int(random.integers(len(numbers)))]
                content[found.start() : found.end()] = str(int(random.integers(1 << 40))).encode()
        else:
            content = content[: max(1, at)]
    return bytes(content)


def check(found: Measured, name: str, honest: Measured, has_values: bool) -> None:
    assert found.seconds < 10, found
    assert found.num_bytes <= 3 * max(honest.num_bytes, 24 * MIB), (found, honest)
    if not found.error:
        assert has_values
        return
    assert found.is_ours, found
    assert name in found.message, found
    assert "weights_only" not in found.message


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_changed_files(name: str, tmp_path: Path) -> None:
    reader = READERS[name](tmp_path)
    whole, honest = reader.file.read_bytes(), measure(reader.read)
    assert not honest.error, honest
    random, refused = np.random.default_rng(0), 0
    shown = {"plain": "cifar-10-python.tar.gz", "structure": "net.safetensors"}
    for _ in range(TRIALS):
        reader.file.write_bytes(reader.seal(mutated(whole, random)))
        found = measure(reader.read, timeout=20)
        check(found, shown.get(reader.file.name, reader.file.name), honest, reader.has_values)
        refused += bool(found.error)
    assert refused > 0


@pytest.mark.slow
def test_changed_answers_of_a_server(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(200_000)
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\nContent-Type: x\r\n\r\n" + content
    random, answer = np.random.default_rng(0), [good]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer[0])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url, md5 = f"http://127.0.0.1:{server.server_port}/file", hashlib.md5(content).hexdigest()
        honest = measure(fetch, url, tmp_path / "file", md5)
        assert not honest.error, honest
        for trial in range(TRIALS):
            head, end, body = good.partition(b"\r\n\r\n")
            answer[0] = mutated(head, random) + end + body if trial % 2 else mutated(good, random)
            check(measure(fetch, url, tmp_path / f"file{trial}", md5, timeout=20), url, honest, True)
        server.shutdown()
    for path in tmp_path.glob("file*"):
        assert path.suffix == ".part" or path.read_bytes() == content


@pytest.mark.slow
def test_archives_of_other_kinds(tmp_path: Path) -> None:
    """Tar members of every type and zip files in place of a tar."""
    path = tmp_path / "cifar-10-python.tar.gz"
    honest = measure(archive(tmp_path).read)
    for kind in range(128):
        with tarfile.open(path, "w:gz") as file:
            member = tarfile.TarInfo(f"{FORM.python}/data_batch_1")
            member.type, member.linkname, member.size = bytes([kind]), member.name, 512
            file.addfile(member, io.BytesIO(b"9" * 512))
        check(measure(cifar.read, FORM, path), path.name, honest, False)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("x", b"y")
    check(measure(cifar.read, FORM, path), path.name, honest, False)

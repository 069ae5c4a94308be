"""The embedded data set and Tiny ImageNet, which are one file each."""

import gzip
import hashlib
import importlib.util
import io
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import slimstart.lab.data
from slimstart.errors import DataError
from slimstart.lab.data import fashion, load, tiny_imagenet
from tests.datasets import photograph, write_tiny_imagenet

PACKAGE = Path(slimstart.lab.data.__file__).parent


def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "embed_fashion.py"
    spec = importlib.util.spec_from_file_location("embed_fashion", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_embedded_file_is_the_one_that_was_reviewed() -> None:
    """Its digest, and those of its arrays, as the script wrote them from the original files."""
    content = (PACKAGE / "fashion.npz").read_bytes()
    assert len(content) <= 3_900_000
    assert hashlib.sha256(content).hexdigest() == "8675f9c390ab8e67b26c8090bffbb0980a29fa05be85762d8880298056e4fe1d"
    assert "Zalando" in (PACKAGE / "LICENSE-fashion-mnist").read_text()
    found = fashion.read()
    digests = [hashlib.md5(tensor.numpy().tobytes()).hexdigest() for tensor in (*found.train, *found.test)]
    assert digests == [
        "cb669ba015a29d6c9c8ab6562879644f",
        "180b2489f8ed3edd95317832764eedaa",
        "10c7e2526e29126ab9b22ee3a02fe21e",
        "8090bef7460eb7a835c87c03323c0c37",
    ]


def test_the_embedded_set() -> None:
    data = load("fashion", batch_size=100)
    assert (data.name, data.num_classes, data.image_shape) == ("fashion", 10, (1, 28, 28))
    assert (data.train.num_images, data.test.num_images) == (6000, 2000)
    for part, count in ((data.train, 600), (data.test, 200)):
        assert torch.cat([labels for _, labels in part.epoch(0)]).bincount().tolist() == [count] * 10
    images, labels = fashion.read().train
    assert float(images.double().mean() / 255) == pytest.approx(0.2869, abs=5e-5)
    assert float(images.double().std(correction=0) / 255) == pytest.approx(0.3538, abs=5e-5)
    # The first ten labels of the original training file.
    assert labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


def test_the_script_takes_the_first_of_each_class_and_writes_the_same_twice(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, count in (("train", 8000), ("t10k", 4000)):
        images = np.repeat(random.integers(0, 256, count, dtype=np.uint8), 28 * 28).reshape(count, 28, 28)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for kind, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            path = tmp_path / f"{name}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(bytes(header) + array.tobytes(), compresslevel=1))
    embed = script()
    written = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in written:
        embed.main(tmp_path, path)
    assert written[0].read_bytes() == written[1].read_bytes()
    with np.load(written[0], allow_pickle=False) as file:  # of t10k, the last that was drawn
        counts, kept = dict.fromkeys(range(10), 0), []
        for index, label in enumerate(labels.tolist()):
            if counts[label] < 200:
                counts[label] += 1
                kept.append(index)
        assert file["test_labels"].tolist() == labels[kept].tolist()
        assert file["test_images"].tolist() == images[kept].tolist()
        assert file["train_images"].shape == (6000, 28, 28)


def images() -> list[Image.Image]:
    return [photograph(64, 64, seed).convert("L" if seed == 2 else "RGB") for seed in range(6)]


def as_decoded(image: Image.Image) -> np.ndarray:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=90)
    return np.asarray(Image.open(content).convert("RGB"))


def test_tiny_imagenet(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path / "tinyimagenet16.npz", images(), labels=[0, 3, 15, 1, 2, 7], val=[0, 1, 0, 0, 1, 0])
    for place in (tmp_path, tmp_path / "tinyimagenet16.npz"):
        found = tiny_imagenet.read(place)
        assert found.train[1].tolist() == [0, 15, 1, 7]
        assert found.test[1].tolist() == [3, 2]
        for index, image in zip([0, 2, 3, 5, 1, 4], torch.cat([found.train[0], found.test[0]]), strict=True):
            assert np.array_equal(image.permute(1, 2, 0).numpy(), as_decoded(images()[index]))
    data = load("tiny_imagenet16", data_dir=tmp_path, batch_size=2)
    assert (data.num_classes, data.image_shape, len(data.train)) == (16, (3, 64, 64), 2)


def test_tiny_imagenet_damaged(tmp_path: Path) -> None:
    path = tmp_path / "tinyimagenet16.npz"
    with pytest.raises(DataError, match=r"tiny_imagenet16 is not in .*: put tinyimagenet16\.npz there"):
        tiny_imagenet.read(tmp_path)
    write_tiny_imagenet(path, images(), labels=[0, 3, 16, 1, 2, 7], val=[0, 1, 0, 0, 1, 0])
    with pytest.raises(DataError, match="labels from 0 to 16, not from 0 to 15"):
        tiny_imagenet.read(tmp_path)
    with np.load(path) as file:
        arrays = dict(file)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"tinyimagenet16\.npz is damaged, or not an \.npz with header_colour"):
        tiny_imagenet.read(tmp_path)
    np.savez(path, **{**arrays, "labels": arrays["labels"][1:]})
    with pytest.raises(DataError, match="has arrays that do not fit each other"):
        tiny_imagenet.read(tmp_path)
    np.savez(path, **{**arrays, "scans": arrays["scans"][1:]})
    with pytest.raises(DataError, match="has arrays that do not fit each other"):
        tiny_imagenet.read(tmp_path)
    np.savez(path, **{**arrays, "header_grey": arrays["header_grey"][:10]})
    with pytest.raises(DataError, match="holds an image that cannot be decoded"):
        tiny_imagenet.read(tmp_path)
    write_tiny_imagenet(path, [photograph(64, 32, 0)], labels=[0], val=[0])
    with pytest.raises(DataError, match="it has 64 x 32 pixels, not 64 x 64"):
        tiny_imagenet.read(tmp_path)


@pytest.mark.slow
def test_the_real_tiny_imagenet() -> None:
    """The digests are those of its published arrays, in their order (N, H, W, C); the constants are its own."""
    folder = Path(__file__).parents[2] / ".." / "shared" / "data"
    if not (folder / "tinyimagenet16.npz").exists():
        pytest.skip("tinyimagenet16.npz is not in ../shared/data beside the repository")
    found = tiny_imagenet.read(folder)
    assert found.train[0].shape == (8000, 3, 64, 64)
    assert found.train[1].bincount().tolist() == [500] * 16
    labels = [hashlib.md5(part[1].numpy().tobytes()).hexdigest() for part in (found.train, found.test)]
    assert labels == ["480fdc1b4ff89d103652779924924971", "5ffa9eac56ad23f0ba09959924647b40"]
    pixels = found.train[0].transpose(0, 1).flatten(1).double() / 255
    # Another JPEG decoder may differ by a grey level, so no digest of pixels.
    assert pixels.mean(1).tolist() == pytest.approx(found.mean, abs=1e-3)
    assert pixels.std(1, correction=0).tolist() == pytest.approx(found.std, abs=1e-3)

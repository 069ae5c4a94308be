"""Folders of images: classes, crops, and equal results with workers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image
from PIL.JpegImagePlugin import JpegImageFile

from slimstart.errors import ConfigError, DataError
from slimstart.lab.data import ImageData, load
from slimstart.lab.data.batches import generator
from slimstart.lab.data.image_folder import EXTENSIONS, centre_box, random_box
from tests.datasets import photograph, write_image_folder

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_image_folder(root)
    return root


def images_of(root: Path, *, batch_size: int = 4, image_size: int = 16, **kwargs: int) -> ImageData:
    return load("image_folder", data_dir=root, batch_size=batch_size, image_size=image_size, **kwargs)


def pixels(images: torch.Tensor) -> np.ndarray:
    """Undo the normalisation: values from 0 to 255, (B, H, W, C)."""
    return 255 * (images.permute(0, 2, 3, 1).numpy() * STD + MEAN)


def test_other_files_have_another_digest(folder: Path, tmp_path: Path) -> None:
    write_image_folder(tmp_path / "same")
    write_image_folder(tmp_path / "other", classes="abd")
    write_image_folder(tmp_path / "more", num_train=7)
    digests = [images_of(root).digest for root in (folder, *(tmp_path / name for name in ("same", "other", "more")))]
    assert digests[0] == digests[1]
    assert len(set(digests[1:])) == 3
    assert images_of(folder, validation=4).digest != digests[0]


def test_images_and_classes_are_found(folder: Path) -> None:
    data = images_of(folder)
    assert (data.name, data.num_classes, data.image_shape) == ("image_folder", 3, (3, 16, 16))
    assert (data.train.num_images, len(data.train)) == (18, 4)
    assert (data.test.num_images, len(data.test)) == (9, 3)
    labels = torch.cat([labels for _, labels in data.test.epoch(0)])
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert load("image_folder", data_dir=folder, batch_size=1).image_shape == (3, 224, 224)


def test_other_files_than_images_are_ignored(tmp_path: Path) -> None:
    write_image_folder(tmp_path, num_train=2, num_test=1)
    (tmp_path / "train" / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    assert images_of(tmp_path).train.num_images == 6


def put_test_images(root: Path, images: list[Image.Image], kind: str = "png") -> None:
    """One in each of the classes a, b, ..., in the place of what is there."""
    write_image_folder(root, num_train=1, num_test=1, classes="abcdef"[: len(images)])
    for path, image in zip(sorted((root / "val").glob("*/*")), images, strict=True):
        path.unlink()
        image.save(path.with_suffix(f".{kind}"), quality=95, subsampling=0)


def test_test_images_are_the_centre_of_the_resized_image(tmp_path: Path) -> None:
    """The slow way: resize the short side to 256/224 of the size, then cut out the centre. No size here is rounded."""
    images = [photograph(*size, seed) for seed, size in enumerate([(64, 64), (96, 64), (64, 128), (32, 32), (48, 32)])]
    put_test_images(tmp_path, images)
    (found, _), = images_of(tmp_path, image_size=28, batch_size=5).test.epoch(0)  # fmt: skip
    for image, original in zip(pixels(found), images, strict=True):
        scale = min(original.size) // 32
        resized = original.resize((original.width // scale, original.height // scale), Image.Resampling.BILINEAR)
        left, top = (resized.width - 28) // 2, (resized.height - 28) // 2
        slow = np.asarray(resized.crop((left, top, left + 28, top + 28)), dtype=float)
        np.testing.assert_allclose(image, slow, atol=1.001)  # a grey level, by the order of rounding


@given(width=st.integers(1, 500), height=st.integers(1, 500), seed=st.integers(0, 10**6))
def test_boxes_are_within_the_image(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = random_box(width, height, generator(seed))[0]
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    left, top, right, bottom = centre_box(width, height)
    assert right - left == pytest.approx(bottom - top) == pytest.approx(min(width, height) * 224 / 256)
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)


def test_boxes_have_the_standard_distribution() -> None:
    boxes = [random_box(1000, 1000, generator(seed)) for seed in range(3000)]
    flips = np.array([flip for _, flip in boxes])
    left, top, right, bottom = np.array([box for box, _ in boxes]).T
    area, ratio = (right - left) * (bottom - top) / 1e6, (right - left) / (bottom - top)
    assert 0.079 < area.min() < 0.09
    assert area.max() > 0.95
    assert 0.747 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.336
    # Uniform area, but that large boxes of an odd ratio do not fit: the mean lies a little below 0.54.
    assert 0.45 < area.mean() < 0.54
    assert abs(np.log(ratio).mean()) < 4 * math.log(4 / 3) / math.sqrt(3 * 3000)
    assert 0.45 < flips.mean() < 0.55
    centre = (left + right) / 2
    assert abs(centre.mean() - 500) < 15
    assert np.corrcoef(left, top)[0, 1] < 0.8  # two draws, not one


def test_a_narrow_image_falls_back_to_the_centre() -> None:
    assert random_box(1000, 30, generator(0))[0] == (480, 0, 520, 30)
    assert random_box(30, 1000, generator(0))[0] == (0, 480, 30, 520)


def test_a_training_image_is_its_box_resized_and_flipped(tmp_path: Path) -> None:
    """The slow way: crop, resize, flip; index i of epoch n has the numbers of (seed, n, i)."""
    write_image_folder(tmp_path, num_train=1, classes="ab", num_test=1)
    files = []
    for name in "ab":
        (tmp_path / "train" / name / "0.jpeg").unlink()
        files.append(photograph(90, 70, ord(name)))
        files[-1].save(tmp_path / "train" / name / "0.png")
    flipped = set()
    for epoch in range(8):
        (images, labels), = images_of(tmp_path, batch_size=2, seed=5).train.epoch(epoch)  # fmt: skip
        for found, label in zip(pixels(images), labels.tolist(), strict=True):
            box, flip = random_box(90, 70, generator(5, epoch, label))
            slow = np.asarray(files[label].resize((16, 16), Image.Resampling.BILINEAR, box), dtype=float)
            np.testing.assert_allclose(found, slow[:, ::-1] if flip else slow, atol=1e-3)
            flipped.add(flip)
    assert flipped == {False, True}


def test_a_large_jpeg_is_decoded_coarsely_and_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduced decoding averages pixels, as the resize would. The odd size is no multiple of the eight."""
    put_test_images(tmp_path, [photograph(801, 603, seed) for seed in range(4)], "jpeg")
    (coarse, _), = images_of(tmp_path, image_size=32).test.epoch(0)  # fmt: skip
    decoded = []
    convert = Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda self, mode: decoded.append(self.size) or convert(self, mode))
    (again, _), = images_of(tmp_path, image_size=32).test.epoch(0)  # fmt: skip
    assert decoded == [(101, 76)] * 4
    assert torch.equal(coarse, again)
    monkeypatch.setattr(JpegImageFile, "draft", lambda self, mode, size: None)
    (whole, _), = images_of(tmp_path, image_size=32).test.epoch(0)  # fmt: skip
    assert decoded[4:] == [(801, 603)] * 4
    assert np.abs(pixels(coarse) - pixels(whole)).max() < 4


def test_workers_and_starts_change_nothing(folder: Path) -> None:
    alone, helped = images_of(folder, seed=3), images_of(folder, seed=3, num_workers=2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    whole = list(alone.train.epoch(2))
    for found, start in ((helped.train.epoch(2), 0), (helped.train.epoch(2, start=3), 3), (alone.train.epoch(2, 4), 4)):
        for (images, labels), (again, same) in zip(whole[start:], found, strict=True):
            assert torch.equal(images, again)
            assert torch.equal(labels, same)
            assert images.is_contiguous()
    assert torch.equal(state, torch.get_rng_state())
    other = next(alone.train.epoch(3))
    assert not torch.equal(whole[0][0], other[0])
    assert not torch.equal(whole[0][0], next(images_of(folder, seed=4).train.epoch(2))[0])


def test_an_epoch_has_every_image_once(folder: Path) -> None:
    data = images_of(folder, batch_size=18)
    (_, labels), = data.train.epoch(0)  # fmt: skip
    assert sorted(labels.tolist()) == [0] * 6 + [1] * 6 + [2] * 6


def test_validation_images_come_from_the_training_folder(tmp_path: Path) -> None:
    write_image_folder(tmp_path, num_train=3, num_test=1, classes="ab")
    for path in sorted((tmp_path / "train").glob("*/*")):
        path.unlink()
    for i in range(6):  # one grey level each: known again after any crop
        Image.new("RGB", (20, 20), (40 * i,) * 3).save(tmp_path / "train" / "ab"[i % 2] / f"{i}.png")
    levels = []
    for seed in (0, 1):
        data = images_of(tmp_path, batch_size=4, validation=2, seed=seed)
        parts = [
            {round(level / 40) for images, _ in part.epoch(0) for level in pixels(images).mean((1, 2, 3))}
            for part in (data.train, data.test)
        ]
        assert parts[0] | parts[1] == set(range(6))
        assert not parts[0] & parts[1]
        levels.append(parts[1])
    assert levels[0] == levels[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_image_is_named(tmp_path: Path, num_workers: int) -> None:
    write_image_folder(tmp_path)
    damaged = tmp_path / "val" / "b" / "0.jpeg"
    for content in (damaged.read_bytes()[:-200], b"", b"text"):
        damaged.write_bytes(content)
        with pytest.raises(DataError, match=r"val/b/0\.jpeg cannot be decoded: .*; remove the file or replace it") as e:
            list(images_of(tmp_path, num_workers=num_workers).test.epoch(0))
        assert "\n" not in str(e.value)


def test_other_formats_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow reads an EPS, whatever its name, by starting Ghostscript."""
    called = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: called.append(args))
    write_image_folder(tmp_path)
    (tmp_path / "val" / "b" / "0.jpeg").unlink()
    photograph(20, 20, 0).save(tmp_path / "val" / "b" / "x.png", "EPS")
    with pytest.raises(DataError, match=r"val/b/x\.png cannot be decoded"):
        list(images_of(tmp_path).test.epoch(0))
    assert not called


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_all_extensions_can_be_read(tmp_path: Path, extension: str) -> None:
    write_image_folder(tmp_path)
    photograph(20, 20, 0).save(tmp_path / "val" / "b" / f"x{extension}")
    assert len(torch.cat([labels for _, labels in images_of(tmp_path).test.epoch(0)])) == 10


def test_folders_without_a_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train is not a folder; images are read from train/CLASS"):
        images_of(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train has no folders; there must be one for each class"):
        images_of(tmp_path)
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(DataError, match=r"train has no images \(\.jpg, .*\) in cat$"):
        images_of(tmp_path)
    photograph(9, 9, 0).save(tmp_path / "train" / "cat" / "x.png")
    with pytest.raises(DataError, match="train has the class cat only; there is nothing to learn from one class"):
        images_of(tmp_path)
    for i in range(8):
        (tmp_path / "train" / f"dog{i}").mkdir()
    with pytest.raises(DataError, match=r"in dog0, dog1, dog2, dog3, dog4 and 3 more$"):
        images_of(tmp_path)
    for i in range(8):
        photograph(9, 9, 0).save(tmp_path / "train" / f"dog{i}" / "x.png")
    with pytest.raises(DataError, match="val is not a folder"):
        images_of(tmp_path)
    assert images_of(tmp_path, validation=3).train.num_images == 6  # which needs no `val`
    (tmp_path / "val" / "bird").mkdir(parents=True)
    photograph(9, 9, 0).save(tmp_path / "val" / "bird" / "x.png")
    with pytest.raises(DataError, match="must have the same classes; only one has bird, cat, dog0, dog1, dog2 and 5"):
        images_of(tmp_path)


def test_a_wrong_image_size_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`image_size` is 0; it must be 1 or more"):
        images_of(folder, image_size=0)

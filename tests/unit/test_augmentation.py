"""Augmentation: RandAugment against Pillow, mixup and CutMix against a slow reference; all by the position alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from slimstart.lab.data import WHOLE, Share
from slimstart.lab.data.arrays import ArraySet
from slimstart.lab.data.augmentation import OPERATIONS, EpochDraws, Mixed, RandAugment, random_box
from slimstart.lab.data.batches import ImageData, Loading, generator
from slimstart.lab.data.image_folder import load as load_folder

SIDES = 13, 17
Reference = Callable[[Image.Image, float, int], Image.Image]


def affine(matrix: Callable[[float, int], tuple[float, ...]]) -> Reference:
    def apply(image: Image.Image, strength: float, sign: int) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix(strength, sign), Image.Resampling.NEAREST)

    return apply


def enhanced(kind: type) -> Reference:
    return lambda image, strength, sign: kind(image).enhance(1 + sign * 0.9 * strength)


HEIGHT, WIDTH = SIDES
REFERENCES: dict[str, Reference] = {
    "identity": lambda image, strength, sign: image,
    "shear_x": affine(lambda s, sign: (1, sign * 0.3 * s, 0, 0, 1, 0)),
    "shear_y": affine(lambda s, sign: (1, 0, 0, sign * 0.3 * s, 1, 0)),
    "translate_x": affine(lambda s, sign: (1, 0, sign * int(150 / 331 * WIDTH * s), 0, 1, 0)),
    "translate_y": affine(lambda s, sign: (1, 0, 0, 0, 1, sign * int(150 / 331 * HEIGHT * s))),
    "rotate": lambda image, strength, sign: image.rotate(sign * 30 * strength),
    "brightness": enhanced(ImageEnhance.Brightness),
    "color": enhanced(ImageEnhance.Color),
    "contrast": enhanced(ImageEnhance.Contrast),
    "sharpness": enhanced(ImageEnhance.Sharpness),
    "posterize": lambda image, strength, sign: ImageOps.posterize(image, 8 - round(4 * strength)),
    "solarize": lambda image, strength, sign: image.point(lambda v: v if v < 255 * (1 - strength) else 255 - v),
    "autocontrast": lambda image, strength, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, sign: ImageOps.equalize(image),
}


def pictures(channels: int) -> Tensor:
    """Noise, noise of low contrast, a gradient, and one colour."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (2, channels, *SIDES), dtype=np.uint8)
    dull = random.integers(90, 140, (1, channels, *SIDES), dtype=np.uint8)
    ramp = np.broadcast_to(np.linspace(0, 255, WIDTH).astype(np.uint8), (1, channels, *SIDES))
    return torch.from_numpy(np.concatenate([noise, dull, ramp, np.full((1, channels, *SIDES), 77, np.uint8)]))


def by_pillow(image: Tensor, reference: Reference, strength: float, sign: int) -> Tensor:
    planes = image.permute(1, 2, 0).numpy()
    found = np.asarray(
        reference(Image.fromarray(planes.squeeze(-1) if planes.shape[-1] == 1 else planes), strength, sign)
    )
    return torch.from_numpy(found.reshape(planes.shape).copy()).permute(2, 0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=list(REFERENCES))
def test_operations_are_those_of_pillow(number: int, channels: int) -> None:
    (name, reference), images = list(REFERENCES.items())[number], pictures(channels)
    assert OPERATIONS[number].__name__ == f"_{name}"
    for strength in (0.0, 0.3, 1.0):
        for sign in (1, -1):
            found = OPERATIONS[number](images.clone(), strength, sign)
            expected = torch.stack([by_pillow(image, reference, strength, sign) for image in images])
            assert found.dtype == torch.uint8
            apart = (found.int() - expected.int()).abs()
            if (
                name == "rotate"
            ):  # Pillow computes coordinates in fixed point: at the edge between two pixels it may differ
                assert (apart > 0).float().mean() < 0.02
            else:
                assert int(apart.max()) <= (1 if name in ("brightness", "color", "contrast", "sharpness") else 0)
                assert (apart > 0).float().mean() < 0.01


def test_each_image_gets_its_own_operations_one_after_the_other() -> None:
    augment, images = RandAugment(num_ops=2, magnitude=12), pictures(3)
    drawn = augment.draw(np.random.default_rng(1), len(images))
    expected = images.clone()
    for i in range(len(images)):
        for code in drawn[:, i].tolist():
            operation, sign = (OPERATIONS[code], 1) if code >= 0 else (OPERATIONS[-1 - code], -1)
            expected[i] = operation(expected[i : i + 1], 0.4, sign)[0]
    assert torch.equal(augment(images, drawn), expected)
    assert torch.equal(images, pictures(3))


def test_operations_and_signs_are_equally_frequent() -> None:
    drawn = RandAugment(3, 9).draw(np.random.default_rng(0), 28_000)
    codes, counts = np.unique(drawn, return_counts=True)
    assert codes.tolist() == list(range(-14, 14))
    assert abs(counts - 3000).max() < 300  # 5.5 standard deviations


def test_no_magnitude_changes_the_geometry_or_the_colours_of_nothing() -> None:
    images = pictures(3)
    for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10):
        assert torch.equal(OPERATIONS[number](images, 0.0, 1), images)


def a_set(augment: RandAugment | None, share: Share = WHOLE) -> ImageData:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (23, 3, 8, 8), dtype=np.uint8))
    arrays = ArraySet("small", 23, (images, torch.arange(23)), (images[:5], torch.arange(5)), (0,) * 3, (1,) * 3, 0)
    return arrays.batches(Loading(5, 3, share=share, augment=augment))


def test_batches_in_memory_are_augmented_by_position() -> None:
    augment = RandAugment(2, 9)
    plain, data = a_set(None), a_set(augment)
    draws = EpochDraws(Loading(5, 3, augment=augment), 7, 20)
    whole = list(data.train.epoch(7))
    for index, ((before, labels), (after, same)) in enumerate(zip(plain.train.epoch(7), whole, strict=True)):
        assert torch.equal(labels, same)
        expected = draws((255 * before).round().to(torch.uint8), index)
        assert torch.equal((255 * after).round().to(torch.uint8), expected)
        assert not torch.equal(before, after)
    for one, other in zip(whole[2:], data.train.epoch(7, start=2), strict=True):
        assert torch.equal(one[0], other[0])
    for part, rank in ((slice(0, 2), 0), (slice(2, 5), 1)):
        for one, other in zip(whole, a_set(augment, Share(rank, 2)).train.epoch(7), strict=True):
            assert torch.equal(one[0][part], other[0])
    assert not torch.equal(whole[0][0], next(iter(data.train.epoch(8)))[0])
    assert torch.equal(next(iter(data.test.epoch(0)))[0], next(iter(plain.test.epoch(0)))[0])


def test_image_folders_are_augmented_by_position(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(random.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(
                    tmp_path / part / name / f"{i}.png"
                )

    def loaded(augment: RandAugment | None) -> ImageData:
        return load_folder(tmp_path, Loading(4, 1, image_size=16, augment=augment))

    plain, data = list(loaded(None).train.epoch(2)), loaded(RandAugment(2, 20))
    whole = list(data.train.epoch(2))
    assert len(whole) == 3
    assert all(torch.equal(one[1], other[1]) for one, other in zip(plain, whole, strict=True))
    assert not any(torch.equal(one[0], other[0]) for one, other in zip(plain, whole, strict=True))
    assert torch.equal(whole[2][0], next(iter(data.train.epoch(2, start=2)))[0])
    assert torch.equal(next(iter(data.test.epoch(0)))[0], next(iter(loaded(None).test.epoch(0)))[0])


# --- mixup and CutMix -----------------------------------------------------------------------------------------------

CLASSES = 4


class Plain:
    """Three batches of six images in each epoch."""

    num_images, batch_size = 20, 6

    def __len__(self) -> int:
        return 3

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, 3):
            random = torch.Generator().manual_seed(10 * number + index)
            yield torch.rand(6, 3, 5, 7, generator=random), torch.randint(CLASSES, (6,), generator=random)


def mixed(mixup: float = 0.0, cutmix: float = 0.0, seed: int = 2) -> Mixed:
    return Mixed(Plain(), CLASSES, mixup, cutmix, seed)


def test_mixup_is_the_weighted_mean_of_neighbours() -> None:
    shares = []
    for index, (images, targets) in enumerate(mixed(mixup=0.8).epoch(4)):
        share = generator(2, 4, index, 2).beta(0.8, 0.8)
        before, labels = list(Plain().epoch(4))[index]
        for i in range(6):
            expected = share * before[i] + (1 - share) * before[i - 1]
            assert torch.allclose(images[i], expected, atol=1e-6)
            for c in range(CLASSES):
                probability = share * (labels[i] == c) + (1 - share) * (labels[i - 1] == c)
                assert float(targets[i, c]) == pytest.approx(float(probability), abs=1e-6)
        shares.append(share)
    assert len(set(shares)) == 3


def test_cutmix_pastes_a_box_and_counts_its_pixels() -> None:
    boxes = set()
    for epoch in range(20):
        for (images, targets), (before, labels) in zip(
            mixed(cutmix=1.0).epoch(epoch), Plain().epoch(epoch), strict=True
        ):
            pasted = (images != before).any(1)
            assert bool((pasted == pasted[0]).all())  # the same box in all images
            rows, columns = (pasted[0].any(dim).nonzero().flatten().tolist() for dim in (1, 0))
            assert int(pasted[0].sum()) == len(rows) * len(columns)
            boxes.add((tuple(rows), tuple(columns)))
            inside = pasted[:, None].expand_as(images)
            assert torch.equal(images[inside], before.roll(1, 0)[inside])
            part = len(rows) * len(columns) / 35
            expected = (1 - part) * F.one_hot(labels, CLASSES) + part * F.one_hot(labels.roll(1), CLASSES)
            assert torch.allclose(targets, expected.float(), atol=1e-6)
    assert len(boxes) > 20


def test_boxes_have_the_area_that_was_drawn_where_they_fit() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        top, bottom, left, right = random_box(40, 60, 0.25, random)
        assert 0 <= top <= bottom <= 40
        assert 0 <= left <= right <= 60
        assert bottom - top <= 20
        assert right - left <= 30
        if top > 0 and bottom < 40:
            assert bottom - top == 20
        if left > 0 and right < 60:
            assert right - left == 30


def test_with_both_each_has_half_of_the_batches() -> None:
    cuts = 0
    for epoch in range(60):
        for (images, _), (before, _) in zip(
            mixed(mixup=1.0, cutmix=1.0).epoch(epoch), Plain().epoch(epoch), strict=True
        ):
            cuts += bool(((images == before) | (images == before.roll(1, 0))).all())
    assert 60 < cuts < 120  # of 180


def test_a_resumed_epoch_has_the_same_batches() -> None:
    whole = list(mixed(0.2, 1.0).epoch(3))
    for one, other in zip(whole[1:], mixed(0.2, 1.0).epoch(3, start=1), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert not torch.equal(whole[0][1], next(iter(mixed(0.2, 1.0, seed=3).epoch(3)))[1])

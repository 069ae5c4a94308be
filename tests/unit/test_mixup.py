"""Mixup and CutMix: pixels and labels of a slow reference, and draws that depend on the position alone."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slimstart.lab.data.augmentation import Mixed, random_box
from slimstart.lab.data.batches import generator

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

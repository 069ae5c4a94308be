"""Batches in memory: functions of (seed, epoch, index), and augmentation against a slow reference."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slimstart.errors import ConfigError, DataError
from slimstart.lab.data import NAMES, load
from slimstart.lab.data.arrays import ArraySet, as_tensors
from slimstart.lab.data.batches import ImageData, Loading, generator, hold_out

MEAN, STD = (0.3, 0.5, 0.7), (0.2, 0.25, 0.3)


def small_set(num_images: int = 23, side: int = 6, padding: int = 2) -> ArraySet:
    """Images that all differ; the label of an image is its index."""
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(1, 256, (num_images, 3, side, side + 1), dtype=np.uint8))
    labels = torch.arange(num_images)
    return ArraySet("small", num_images, (images, labels), (images[:7], labels[:7]), MEAN, STD, padding)


def batches(batch_size: int = 5, seed: int = 0, validation: int = 0, device: str = "cpu", **kwargs: int) -> ImageData:
    return small_set(**kwargs).batches(Loading(batch_size, seed, torch.device(device), validation))


def variants(image: np.ndarray, padding: int) -> dict[bytes, tuple[int, int, bool]]:
    """Every normalised crop of one image, flipped and not, one at a time; rounded, as a key."""
    _, height, width = image.shape
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    found = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            for flip in (False, True):
                pixels = crop[:, :, ::-1] if flip else crop
                planes = [(pixels[c] / 255 - MEAN[c]) / STD[c] for c in range(3)]
                found[key(np.stack(planes))] = (top, left, flip)
    return found


def key(image: np.ndarray) -> bytes:
    return (image * 1000).round().astype(np.int32).tobytes()


def test_crops_and_flips_are_those_of_a_slow_reference() -> None:
    padding = 1
    arrays, data = small_set(padding=padding), batches(padding=padding)
    references = [variants(image.numpy(), padding) for image in arrays.train[0]]
    seen: Counter[tuple[int, int, bool]] = Counter()
    for epoch in range(40):
        for images, labels in data.train.epoch(epoch):
            assert images.dtype == torch.float32
            assert labels.dtype == torch.int64
            assert images.is_contiguous()
            for image, label in zip(images, labels, strict=True):
                seen[references[label][key(image.numpy())]] += 1
    # 9 places, flipped or not: 18 cases, about 44 of 800 each; 6 standard deviations are 39.
    assert len(seen) == 18
    assert max(seen.values()) < 90
    assert sum(seen.values()) == 40 * 20


def test_an_epoch_has_every_image_once_and_no_short_batch() -> None:
    data = batches(batch_size=5)
    orders = []
    for epoch in range(3):
        labels = [labels for _, labels in data.train.epoch(epoch)]
        assert [len(some) for some in labels] == [5, 5, 5, 5]
        orders.append(torch.cat(labels).tolist())
        assert len(set(orders[-1])) == 20
    assert orders[0] != orders[1] != orders[2]
    assert (len(data.train), data.train.num_images, data.train.batch_size) == (4, 23, 5)
    whole = batches(batch_size=23)
    assert sorted(torch.cat([labels for _, labels in whole.train.epoch(0)]).tolist()) == list(range(23))


def test_test_images_are_complete_in_order_and_not_augmented() -> None:
    arrays, data = small_set(), batches(batch_size=1)
    assert data.test.batch_size == 4  # evaluation takes larger batches
    for epoch in (0, 1):
        found = list(data.test.epoch(epoch))
        assert [len(labels) for _, labels in found] == [4, 3]
        assert torch.cat([labels for _, labels in found]).tolist() == list(range(7))
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        expected = (arrays.test[0].double() / 255 - mean) / std
        torch.testing.assert_close(torch.cat([images for images, _ in found]).double(), expected, atol=1e-5, rtol=0)
    assert len(list(data.test.epoch(0, start=1))) == 1


@given(seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6), start=st.integers(0, 4))
def test_a_batch_depends_on_seed_epoch_and_index_alone(seed: int, epoch: int, start: int) -> None:
    data = batches(seed=seed)
    whole = list(data.train.epoch(epoch))
    torch.manual_seed(epoch)  # no global generator has a say
    list(data.train.epoch(epoch + 1))
    state, one = torch.get_rng_state(), batches(seed=seed).train.epoch(epoch, start=start)
    rest = list(one)
    assert torch.equal(state, torch.get_rng_state())
    assert len(rest) == 4 - start
    for (images, labels), (again, same) in zip(whole[start:], rest, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(labels, same)


def test_two_epochs_can_run_at_once() -> None:
    data = batches()
    first, second = data.train.epoch(0), data.train.epoch(1)
    mixed = [labels for pair in zip(first, second, strict=True) for _, labels in pair]
    alone = [[labels for _, labels in data.train.epoch(n)] for n in (0, 1)]
    assert all(torch.equal(mixed[2 * i + n], alone[n][i]) for n in (0, 1) for i in range(4))


def test_seeds_and_epochs_do_not_mix() -> None:
    """(seed 1, epoch 0) is not (seed 0, epoch 1), nor is a large seed a small one with a longer key."""
    streams = [(0,), (0, 0), (0, 0, 0), (0, 1), (1, 0), (1,), (2**32, 0), (0, 1, 0), (2**32,)]
    assert len({generator(*stream).bytes(8) for stream in streams}) == len(streams)
    orders = {
        tuple(label for _, labels in batches(seed=seed).train.epoch(epoch) for label in labels.tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_validation_images_are_fixed_and_disjoint() -> None:
    whole = small_set().train[0].double() / 255
    held = []
    for seed in (0, 1):
        data = batches(seed=seed, validation=6, batch_size=17)
        test = []
        for images, labels in data.test.epoch(0):
            test += labels.tolist()
            back = images.double() * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
            torch.testing.assert_close(back, whole[labels], atol=1e-6, rtol=0)
        train = torch.cat([labels for _, labels in data.train.epoch(0)]).tolist()
        assert sorted(test + train) == list(range(len(whole)))
        assert (data.train.num_images, data.test.num_images) == (17, 6)
        held.append(test)
    assert held[0] == held[1] != list(range(6))
    more = hold_out(23, 9)[1]
    assert set(held[0]) < set(more.tolist())  # a larger part contains the smaller one


def test_wrong_arguments_are_refused() -> None:
    for size in (0, 24):
        with pytest.raises(ConfigError, match=f"`batch_size` is {size}; it must be from 1 to 23"):
            batches(batch_size=size)
    for number in (-1, 23):
        with pytest.raises(ConfigError, match=f"`validation` is {number}; it takes images from the 23"):
            batches(validation=number)
    for start in (-1, 5):
        with pytest.raises(ConfigError, match=f"`start` is {start}; an epoch has 4 batches"):
            batches().train.epoch(0, start=start)
    with pytest.raises(ConfigError, match="`name` is 'mnist'; the data sets are fashion, cifar10"):
        load("mnist", batch_size=1)
    with pytest.raises(ConfigError, match="`seed` is -1; it must be 0 or more"):
        load("fashion", batch_size=1, seed=-1)
    with pytest.raises(ConfigError, match="`num_workers` is -2; it must be 0 or more"):
        load("fashion", batch_size=1, num_workers=-2)
    with pytest.raises(ConfigError, match="`image_size` is 32; fashion has images of 28 x 28"):
        load("fashion", batch_size=1, image_size=32)


def test_arrays_that_are_not_images_are_refused() -> None:
    images, labels = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)
    for bad_images, bad_labels, message in (
        (images.astype(np.float32), labels, r"x\.npz has images of type float32 and shape \(4, 8, 8, 3\), not uint8"),
        (images[0, 0], labels[:1], r"shape \(8, 3\), not uint8"),
        (images, labels[:3], r"4 images, but labels of type int64 and shape \(3,\)"),
        (images, labels.astype(float), "labels of type float64"),
        (images[:0], labels[:0], "0 images, but labels"),
        (images, labels + 1, "labels from 1 to 4, not from 0 to 3"),
        (images, labels - 1, "labels from -1 to 2, not from 0 to 3"),
    ):
        with pytest.raises(DataError, match=message):
            as_tensors(bad_images, bad_labels, 4, "x.npz")


def test_load_knows_every_name(tmp_path: Path) -> None:
    """Each either loads or says what is missing, and none falls through to another."""
    for name in NAMES:
        if name == "fashion":
            assert load(name, batch_size=10).name == name
        else:
            with pytest.raises(DataError, match="train is not a folder" if name == "image_folder" else name):
                load(name, data_dir=tmp_path, batch_size=10, download=False)


@pytest.mark.gpu
def test_the_same_bits_on_a_gpu_without_waiting_for_it() -> None:
    def equal(here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor]) -> bool:
        return all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))

    here, there = batches(), batches(device="cuda")
    list(there.train.epoch(0))  # the first pinned memory is taken from the driver, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [*there.train.epoch(3), *there.test.epoch(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [*here.train.epoch(3), *here.test.epoch(3)]
    assert all(equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("at_once", [2, 3, 100])
def test_batches_prepared_together_are_the_same(at_once: int, start: int) -> None:
    one, several = (batches(seed=3).train for _ in range(2))
    several._at_once = at_once  # type: ignore[attr-defined]  # as on a GPU
    found, expected = list(several.epoch(2, start)), list(one.epoch(2, start))
    assert len(found) == len(expected) == 4 - start
    for (images, labels), (same_images, same_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)

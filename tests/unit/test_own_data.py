"""Data sets of a user's own: what a factory may return, and that no file makes its code run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimstart.errors import ConfigError, DataError
from slimstart.lab.data import load
from slimstart.lab.data.augmentation import RandAugment
from slimstart.lab.recipes.recipe import Recipe, as_toml, read
from slimstart.lab.run.run_folder import Run
from tests import own_data
from tests.integration.test_program import SELDOM, started


def loaded(name: str, **settings: Any) -> Any:
    return load(f"tests.own_data:{name}", **{"batch_size": 10, **settings})


def test_two_pairs_of_arrays_are_a_data_set() -> None:
    data = loaded("pairs")
    images, labels = own_data.arrays()
    assert (data.num_classes, data.image_shape) == (3, (3, 16, 12))
    assert (data.train.num_images, data.test.num_images) == (40, 20)
    mean, std = images[:40].mean((0, 1, 2)) / 255, images[:40].std((0, 1, 2)) / 255
    found = torch.cat([batch for batch, _ in data.test.epoch(0)])
    assert torch.cat([some for _, some in data.test.epoch(0)]).tolist() == labels[40:].tolist()
    expected = (images[40:] / 255 - mean) / std
    assert np.allclose(found.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)
    assert loaded("pairs", data_dir="20").image_shape == (3, 16, 20)
    assert loaded("pairs", validation=4).test.num_images == 4
    assert loaded("grey").image_shape == (1, 16, 12)


def test_an_array_set_says_more() -> None:
    data, (images, labels) = loaded("digits", batch_size=60), own_data.arrays()
    (batch, found), *rest = data.train.epoch(0)
    assert not rest
    assert found.tolist() != labels.tolist()
    # Neither shifted nor mirrored: the same images in another order.
    expected = sorted((images / 255 - 0.5).astype(np.float32).sum((1, 2, 3)) / 0.25)
    assert np.allclose(sorted(batch.sum((1, 2, 3)).tolist()), expected, atol=1e-2)
    plain = {image.tobytes() for image in ((255 * (0.25 * batch + 0.5)).round().to(torch.uint8).numpy())}
    assert plain == {image.transpose(2, 0, 1).tobytes() for image in images}


def test_batches_of_ones_own_are_used_as_they_are() -> None:
    data, same = loaded("batches", batch_size=100, seed=4), load("fashion", batch_size=100, seed=4)
    for (one, labels), (other, expected) in zip(data.train.epoch(1), same.train.epoch(1), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(labels, expected)
    with pytest.raises(ConfigError, match=r"`rand_augment` is set, but .* takes no `augment`"):
        loaded("own_batches", augment=RandAugment(2, 9))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("nothing", ConfigError, "has no attribute 'nothing'"),
        ("wrong", ConfigError, "returns a int; a factory must return two pairs of images and labels, an ArraySet"),
        ("failing", ConfigError, "fails: OSError: the disk is on fire"),
        ("uneven", DataError, "training images, has 60 images, but labels of type int64 and shape"),
        ("unequal", DataError, r"of shapes \(3, 16, 12\) and \(3, 17, 12\); they must be the same"),
        ("empty", DataError, "60 training and 0 test images"),
        ("leaving", ConfigError, "fails: SystemExit: 0"),
    ],
)
def test_what_is_no_data_set_is_refused(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        loaded(name)


def test_no_file_makes_code_run(tmp_path: Path) -> None:
    recipe = Recipe(data="tests.own_data:pairs")
    (tmp_path / "recipe.toml").write_text(as_toml(recipe))
    with pytest.raises(
        ConfigError, match=r"code that is never run on the word of a file: give --data tests\.own_data:"
    ):
        read(tmp_path / "recipe.toml")
    with pytest.raises(ConfigError, match="give --data"):
        read(tmp_path / "recipe.toml", own_data="tests.own_data:grey")
    assert read(tmp_path / "recipe.toml", own_data="tests.own_data:pairs") == recipe
    run = Run(tmp_path / "run")
    run.create(recipe)
    assert run.recipe(own_data=recipe.data) == recipe


def test_a_network_is_trained_on_it(tmp_path: Path) -> None:
    recipe = Recipe(
        data="tests.own_data:pairs", width=0.25, budget="flops=0.4", epochs=1, batch_size=10, rand_augment=1
    )
    record = started(tmp_path / "run", recipe, place=SELDOM).train()
    assert (record.data, record.num_classes, record.image_shape) == ("tests.own_data:pairs", 3, (3, 16, 12))

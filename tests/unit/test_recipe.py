"""Recipes: refused settings, files, presets with the rows of the paper, and learning rates step by step."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimstart.errors import ConfigError
from slimstart.graph import trace
from slimstart.lab.recipes.presets import CIFAR, IMAGENET, PRESETS, preset
from slimstart.lab.recipes.recipe import Recipe, as_toml, make_model, merged, parse_budget, read
from slimstart.lab.recipes.schedules import learning_rate, parse_schedule
from slimstart.policies import Channels, Flops, JointBudget, Paper, Params


def test_budgets_are_parsed() -> None:
    assert parse_budget("flops=0.1") == Flops(0.1)
    assert parse_budget(" params = 5e-2") == Params(0.05)
    assert parse_budget("channels=1") == Channels(1.0)
    assert parse_budget("flops=0.1 + params=0.05") == JointBudget((Flops(0.1), Params(0.05)))
    for wrong in (
        "flops=0.1+",
        "flops=0.1+flops=0.2",
        "flops=0.1,params=0.2",
        "flops",
        "flops=",
        "flop=0.1",
        "flops=0",
        "flops=1.01",
        "flops=nan",
        "0.1",
        "flops=0.1=0.2",
    ):
        with pytest.raises(ConfigError, match="`budget` is"):
            parse_budget(wrong)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(data="mnist", epochs=0, lr=0.0, momentum=2.0, seed=-1, budget="flops=3")
    for name in ("data", "epochs", "lr", "momentum", "seed", "budget"):
        assert f"`{name}` is" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dense", "budget": "flops=0.1"}, "the method dense has no budget; leave it out"),
        ({"model": "mine:make", "width": 0.5}, "`width` is 0.5, but it only applies to networks of ours"),
        ({"warmup_epochs": 500.0}, "`warmup_epochs` is 500.0; it must be less than `epochs`, 300"),
        ({"settle_at": 1.5}, r"`settle_at` is 1.5; it must be in \[0, 1\]"),
        # the policy
        ({"policy": "best"}, "`policy` is 'best'; it must be one of equal_worth, paper"),
        ({"policy": "equal_worth", "coupling": "filter"}, "the policy equal_worth needs stream"),
        ({"policy": "equal_worth", "estimator": "gumbel"}, "`estimator` is 'gumbel', but only the policy paper has it"),
        # the place of the dense network
        ({"full_model_device": "cuda"}, "`full_model_device` is 'cuda'; it must be cpu, or left out"),
        (
            {"full_model_device": "cpu", "method": "uniform"},
            "the method uniform has no dense network besides .* choose the method slimstart",
        ),
        (
            {"full_model_device": "cpu", "method": "dense", "budget": None},
            "the method dense has no dense network beside",
        ),
        (
            {"full_model_device": "cpu", "policy": "paper", "estimator": "gumbel"},
            "the estimator gumbel trains the dense network; .* choose one of .*vr_pge",
        ),
        # methods and their schedules
        ({"rounds": 0}, "`rounds` is 0; it must be at least 1"),
        ({"rounds": 2}, "`rounds` is 2, .* `finetune_epochs` is 0"),
        ({"rounds": 4, "finetune_epochs": 3}, "`rounds` is 4, .* `finetune_epochs` is 3"),
        ({"penalty": -1.0}, r"`penalty` is -1\.0; .* negative"),
        ({"protocol": "fair"}, "`protocol` is 'fair'; it must be one of original, uniform"),
        (
            {"method": "l2"},
            "`method` is 'l2'; it must be one of .*l1, soft, thinet, provable, slimming, grow-efficient",
        ),
        ({"estimator": "straight"}, "`estimator` is 'straight'; it must be one of .*ste, sigmoid_ste, gumbel"),
        ({"method": "soft", "budget": None}, "`budget` is missing; the method soft needs one"),
        ({"structure_lr": 0.0}, r"`structure_lr` is 0\.0; it must be positive"),
        # optimizers, averages and augmentation
        ({"optimizer": "lion"}, "`optimizer` is 'lion'; it must be one of sgd, adam, adamw, rmsprop"),
        ({"beta1": 0.9}, "`beta1` is 0.9, but the optimizer sgd has no such setting; .* choose adam, adamw"),
        ({"optimizer": "adamw", "momentum": 0.9}, "`momentum` is 0.9, but the optimizer adamw has no such .*rmsprop"),
        ({"optimizer": "adamw", "nesterov": True}, "`nesterov` is True, but the optimizer adamw .* choose sgd"),
        ({"nesterov": True, "momentum": 0.0}, "`nesterov` needs momentum, and `momentum` is 0.0"),
        ({"optimizer": "adam", "beta2": 1.0}, "`beta2` is 1.0; it must be at least 0 and less than 1"),
        ({"optimizer": "adam", "eps": 0.0}, "`eps` is 0.0; it must be positive"),
        ({"ema_decay": 1.0}, "`ema_decay` is 1.0; it must be between 0 and 1"),
        (
            {"ema_decay": 0.9, "method": "l1"},
            "the method l1 trains several networks, .* choose one of slimstart, dense",
        ),
        ({"ema_decay": 0.9, "policy": "paper"}, "another sub-network at each step, .* choose the policy equal_worth"),
        ({"ema_decay": 0.9, "full_model_device": "cpu"}, "averages of weights in the host's memory are not supported"),
        ({"mixup": -1.0}, "`mixup` is -1.0; it must not be negative"),
        ({"cutmix": float("nan")}, "`cutmix` is nan; it must not be negative or infinite"),
        ({"rand_augment_magnitude": 5.0}, "`rand_augment` is 0; leave the magnitude out"),
        ({"rand_augment": 2, "rand_augment_magnitude": 31.0}, r"`rand_augment_magnitude` is 31.0; .* in \[0, 30\]"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings)


def test_the_former_name_of_a_method_is_accepted_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('method = "narrow"\n')
    assert Recipe(method="uniform").method == "uniform"
    assert not caplog.text
    assert read(path) == Recipe(method="uniform")
    assert "the method narrow is called uniform now; the old name is deprecated" in caplog.text


recipes = st.builds(
    Recipe,
    epochs=st.integers(1, 1000),
    lr=st.floats(1e-6, 10),
    weight_decay=st.floats(0, 1e-2),
    seed=st.integers(0, 2**31),
    settle_at=st.floats(0, 1),
    budget=st.floats(1e-3, 1).map(lambda fraction: f"flops={fraction}"),
    image_size=st.none() | st.integers(1, 1000),
    finetune_epochs=st.integers(0, 5),
    full_model_device=st.sampled_from([None, "cpu"]),
)


@given(recipes)
def test_recipe_file_round_trip(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    file = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    file.write_text(as_toml(recipe))
    assert read(file) == recipe


def test_the_dense_method_has_no_budget(tmp_path: Path) -> None:
    dense = merged(Recipe(), {"method": "dense"})
    assert dense.budget is None
    (tmp_path / "dense.toml").write_text(as_toml(dense))
    assert read(tmp_path / "dense.toml") == dense


INTEGERS = [name for name, value in vars(Recipe()).items() if type(value) is int] + ["resample_every", "align"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = [", "cannot be used"),
        ("epoch = 3", "`epoch` is no field of a recipe; do you mean `epochs`"),
        ("nonsense_xyz = 3", "`nonsense_xyz` is no field of a recipe$"),
        ('epochs = "three"', "`epochs` is 'three'"),
        ("epochs = 3.5", "`epochs` is 3.5"),
        ("epochs = true", "`epochs` is True"),
        ("lr = -1", "`lr` is -1.0"),
        *((f"{name} = 0x{4000 * 'f'}", f"`{name}` is an integer of 16000 bits") for name in INTEGERS),
        (f"epochs = {2**63}", "`epochs` is an integer of 64 bits; it must be less than 2\\*\\*63"),
        ('extends = "vgg17-cifar10"', "vgg16-cifar10"),
        ("extends = 3", "no recipe 3"),
        ('model = "os:getcwd"', "never run on the word of a file"),
    ],
)
def test_wrong_recipe_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "recipe.toml")


def test_code_in_a_file_is_accepted_if_given_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('model = "mine:make"')
    assert read(tmp_path / "recipe.toml", "mine:make").model == "mine:make"
    with pytest.raises(ConfigError, match="give --model mine:make"):
        read(tmp_path / "recipe.toml", "other:make")


# --------------------------------------------------------------------------- presets


def test_presets_have_the_settings_of_the_appendix_and_the_release() -> None:
    assert (CIFAR.batch_size, CIFAR.lr, CIFAR.momentum, Paper().structure_lr) == (256, 0.1, 0.9, 12e-3)
    assert (CIFAR.warmup_epochs, CIFAR.label_smoothing, CIFAR.weight_decay) == (0, 0, 5e-4)
    assert (CIFAR.epochs, CIFAR.finetune_epochs, CIFAR.finetune_lr, CIFAR.num_masks) == (300, 40, 1e-3, 10)
    assert (IMAGENET.batch_size, IMAGENET.lr, IMAGENET.momentum) == (256, 0.256, 0.875)
    assert (IMAGENET.structure_lr, IMAGENET.label_smoothing, IMAGENET.warmup_epochs > 0) == (None, 0.1, True)
    for base in (CIFAR, IMAGENET):
        assert (base.estimator, base.coupling, base.resample_every, base.settle_at) == ("vr_pge", "filter", 1, 1.0)


LARGE = {"resnet50", "wrn28_10", "mobilenet_v1"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if p.recipe.model in LARGE else ())
        for name, p in PRESETS.items()
        if p.paper and p.recipe.method == "slimstart"
    ],
)
@pytest.mark.slow
def test_a_search_starts_at_the_flops_that_the_paper_reports(name: str) -> None:
    entry = PRESETS[name]
    assert entry.paper is not None
    classes, side = (1000, 224) if "imagenet" in name else (10, 32)
    network = make_model(entry.recipe.model, num_classes=classes, in_channels=3)
    graph = trace(network, torch.zeros(1, 3, side, side), "filter")
    assert isinstance(entry.recipe.parsed_budget, Channels)
    s = torch.full((graph.num_units,), entry.recipe.parsed_budget.fraction, dtype=torch.float64)
    bound = Flops(1.0).bind(graph.costs)
    assert 100 * float(bound.expected(s)) / bound.dense == pytest.approx(entry.paper.flops, rel=0.01)


def rates(name: str, epochs: list[int]) -> list[float]:
    """The learning rate in the first step of some epochs."""
    return [learning_rate(preset(name), 100 * epoch, steps_per_epoch=100) for epoch in epochs]


@pytest.mark.parametrize(
    ("name", "epochs", "expected"),
    [
        ("l1-vgg16-cifar10", [0, 79, 80, 119, 120, 160, 199], [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-3]),
        (
            "l1-resnet20-cifar10-uniform",
            [5, 90, 91, 135, 136, 182, 273, 318],
            [0.1, 0.1, *[0.01] * 2, 1e-3, 0.1, 0.01, 1e-3],
        ),
        ("soft-resnet20-cifar10", [1, 59, 60, 120, 160], [0.1, 0.1, 0.02, 0.004, 0.0008]),
        ("thinet-vgg16-cifar10", [160, 185], [1e-3, 1e-3]),
        (
            "provable-vgg16-cifar10",
            [10, 29, 30, 299, 300, 330, 449],
            [0.05, 0.05, 0.025, 0.05 / 512, 0.05, 0.025, 0.05 / 16],
        ),
        ("slimming-resnet20-cifar10", [80, 160, 239, 240, 280], [0.01, 0.1, 0.1, 0.01, 1e-3]),
        ("grow-efficient-vgg16-cifar10", [79, 80, 120], [0.1, 0.01, 1e-3]),
    ],
)
def test_originals_have_the_learning_rates_of_their_authors(
    name: str, epochs: list[int], expected: list[float]
) -> None:
    assert rates(name, epochs) == pytest.approx(expected)


def test_originals_have_the_budgets_of_the_paper_and_cut_each_layer_once() -> None:
    for model, flops in (("vgg16", 0.087), ("resnet20", 0.361)):
        own = {name: entry.recipe for name, entry in PRESETS.items() if f"-{model}-cifar10" in name}
        assert {recipe.parsed_budget for recipe in own.values()} == {Flops(flops)}
        methods = ["l1", "soft", "thinet", "provable", "slimming", "grow-efficient"]
        assert {name for name, recipe in own.items() if recipe.protocol == "original"} == {
            f"{method}-{model}-cifar10" for method in methods
        }
        assert {name for name, recipe in own.items() if recipe.protocol == "uniform"} == {
            f"{method}-{model}-cifar10-uniform" for method in ("l1", "soft", "thinet")
        }
        network = make_model(model, num_classes=10, in_channels=3)
        layers = len(trace(network, torch.zeros(1, 3, 32, 32), coupling="stream").groups)
        thinet = own[f"thinet-{model}-cifar10"]
        assert (thinet.rounds, thinet.finetune_epochs) == (layers, 2 * layers)
    assert [preset(f"slimming-{model}-cifar10").penalty for model in ("vgg16", "resnet20")] == [1e-4, 1e-5]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_file_round_trip(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(as_toml(preset(name)))
    assert read(tmp_path / "config.toml").hash == preset(name).hash


@pytest.mark.parametrize("wrong", ["x", None, 10**400])
def test_other_values_than_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"`finetune_lr` is .* must be a number"):
        Recipe(finetune_lr=wrong)


def test_integers_and_floats_give_the_same_hash() -> None:
    assert Recipe(lr=1, warmup_epochs=5).hash == Recipe(lr=1.0, warmup_epochs=5.0).hash  # type: ignore[arg-type]


def test_an_unknown_preset_is_refused_with_suggestions() -> None:
    with pytest.raises(ConfigError, match="resnet20-cifar10"):
        preset("resnet20-cifar")


# --------------------------------------------------------------------------- the learning rate


def all_rates(steps_per_epoch: int = 4, **settings: Any) -> list[float]:
    recipe = Recipe(**settings)
    return [learning_rate(recipe, step, steps_per_epoch) for step in range(recipe.total_epochs * steps_per_epoch)]


def test_steps_by_hand() -> None:
    found = all_rates(epochs=4, lr=0.2, schedule="steps:0.5,0.75x0.1")
    assert found == pytest.approx([0.2] * 8 + [0.02] * 4 + [0.002] * 4)
    found = all_rates(epochs=2, lr=1.0, schedule="steps:0.3x0.5")  # of 8 steps: from the one that begins at 3/8 on
    assert found == pytest.approx([1.0] * 3 + [0.5] * 5)


def test_schedule_steps_are_fractions_of_the_epochs_after_warm_up() -> None:
    found = all_rates(epochs=3, lr=1.0, warmup_epochs=1.0, schedule="steps:0.5x0.1")
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 4 + [0.1] * 4)


def test_fine_tuning_has_its_own_schedule() -> None:
    settings = {"epochs": 1, "lr": 1.0, "schedule": "constant", "finetune_epochs": 2, "finetune_lr": 0.5}
    assert all_rates(**settings) == [1.0] * 4 + [0.5] * 8
    found = all_rates(**settings, finetune_schedule="steps:0.25,0.5x0.2")
    assert found == pytest.approx([1.0] * 4 + [0.5] * 2 + [0.1] * 2 + [0.02] * 4)
    found = all_rates(**settings, finetune_schedule="cosine")
    assert found[4] == 0.5
    assert found[8] == pytest.approx(0.25)
    assert found[4:] == sorted(found[4:], reverse=True)


@pytest.mark.parametrize(
    "text",
    [
        *("", "linear", "cosine:", "constant:0.5", "step:0.5x0.1", "steps", "steps:", "steps:x0.1", "steps:0.5"),
        *("steps:0.5x", "steps:0.5x1", "steps:0.5x0", "steps:0.5x-0.1", "steps:0.5xnan", "steps:0.5x0.1x0.1"),
        *("steps:0x0.1", "steps:1x0.1", "steps:-0.5x0.1", "steps:nanx0.1", "steps:0.75,0.5x0.1", "steps:0.5,,0.7x0.1"),
    ],
)
def test_wrong_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it must be cosine, constant, or steps such as steps:0\.5,0\.75x0\.1"):
        parse_schedule(text)
    for name in ("schedule", "finetune_schedule"):
        with pytest.raises(ConfigError, match=f"`{name}` is '{text}'; it must be cosine"):
            Recipe(**{name: text})  # type: ignore[arg-type]


def test_the_learning_rate_by_hand() -> None:
    recipe = dataclasses.replace(Recipe(), epochs=10, lr=1.0, warmup_epochs=2.0, finetune_epochs=2, finetune_lr=0.01)
    rates = [learning_rate(recipe, step, steps_per_epoch=5) for step in range(60)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[30] == pytest.approx(0.5)  # half of the 40 steps after the warm-up
    assert rates[49] == pytest.approx(0.5 * (1 + math.cos(math.pi * 39 / 40)))
    assert rates[50:] == [0.01] * 10


def search_epochs(**settings: Any) -> int:
    return Recipe(**settings).search_epochs


def test_search_epochs() -> None:
    assert search_epochs(epochs=10) == 10
    assert search_epochs(epochs=10, settle_at=0.25) == 2
    assert search_epochs(epochs=10, method="uniform") == 0


def test_another_policy_resets_settings_of_the_paper() -> None:
    own = merged(preset("vgg16-cifar10"), {"policy": "equal_worth"})
    assert (own.coupling, own.resample_every) == (None, None)
    assert merged(own, {"resample_every": 7, "policy": "paper"}).resample_every == 7
    assert merged(preset("vgg16-cifar10"), {"policy": "paper"}) == preset("vgg16-cifar10")

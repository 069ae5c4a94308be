"""Comparisons before anything runs: contenders, their epochs, names, and refused arguments."""

import re
from pathlib import Path
from typing import Any

import pytest

from slimstart.errors import ConfigError
from slimstart.lab.recipes.presets import preset
from slimstart.lab.recipes.recipe import METHODS, Recipe, merged
from slimstart.lab.run.comparison import Contender, contender, plan, refuse_changes, trials
from slimstart.lab.run.run_folder import Run

BASE = Recipe(model="small", lr=0.2, finetune_lr=0.003, epochs=12)
STEPS = "steps:0.5,0.75x0.1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uniform", Contender("uniform")),
        (" slimstart ", Contender("slimstart")),
        ("slimstart:pge", Contender("slimstart", "pge")),
        ("slimstart : pge", Contender("slimstart", "pge")),
    ],
)
def test_contenders_are_read(text: str, expected: Contender) -> None:
    assert contender(text) == expected
    assert str(expected) == text.replace(" ", "")


def test_a_contender_may_have_its_former_name(caplog: pytest.LogCaptureFixture) -> None:
    assert contender("narrow:front_heavy") == Contender("uniform", "front_heavy")
    assert "the method narrow is called uniform now" in caplog.text


def test_a_variant_is_an_estimator_or_a_protocol() -> None:
    assert Contender("slimstart", "pge").changes == {"method": "slimstart", "policy": "paper", "estimator": "pge"}
    assert Contender("slimstart", "paper").changes == {"method": "slimstart", "policy": "paper"}
    worth = merged(preset("vgg16-cifar10"), Contender("slimstart", "equal_worth").changes)
    assert (worth.policy, worth.coupling, worth.resample_every) == ("equal_worth", None, None)
    assert Contender("l1", "paper").changes == {"method": "l1", "protocol": "paper"}  # which the recipe refuses
    assert Contender("l1", "uniform").changes == {"method": "l1", "protocol": "uniform"}
    assert Contender("dense").changes == {"method": "dense"}


# Method, variant, epochs in all: first epochs, then those of retraining.
SPLITS = [
    ("dense", None, 40, 40, 0),
    ("uniform", None, 40, 40, 0),
    ("random", None, 40, 40, 0),
    ("soft", None, 40, 40, 0),
    ("soft", "original", 40, 40, 0),
    ("soft", "uniform", 40, 20, 20),
    ("l1", None, 40, 20, 20),
    ("l1", "uniform", 41, 21, 20),
    ("thinet", None, 2, 1, 1),
    ("provable", None, 1, 1, 0),
    ("slimming", None, 300, 150, 150),
    ("slimstart", None, 340, 340, 0),
    ("slimstart", "paper", 340, 300, 40),
    ("slimstart", "pge", 34, 30, 4),
    ("slimstart", "paper", 40, 35, 5),  # 4.7
    ("grow-efficient", None, 340, 300, 40),
    ("grow-efficient", None, 1, 1, 0),
]


@pytest.mark.parametrize(("method", "variant", "total", "first", "rest"), SPLITS)
def test_how_epochs_are_spent(method: str, variant: str | None, total: int, first: int, rest: int) -> None:
    found = plan(Contender(method, variant), merged(BASE, {"schedule": STEPS}), total)
    assert (found.pop("epochs"), found.pop("finetune_epochs")) == (first, rest)
    prunes_trained = method in ("l1", "thinet", "provable", "slimming") or variant == "uniform"
    assert found == ({"finetune_lr": 0.2, "finetune_schedule": STEPS} if prunes_trained else {})


def test_the_protocol_of_the_recipe_is_that_of_soft_pruning() -> None:
    uniform = merged(BASE, {"protocol": "uniform"})
    assert plan(Contender("soft"), uniform, 40)["finetune_epochs"] == 20
    assert plan(Contender("soft", "original"), uniform, 40)["finetune_epochs"] == 0


def test_no_epoch_is_lost() -> None:
    for method, variant, *_ in SPLITS:
        for total in range(1, 400):
            found = plan(Contender(method, variant), BASE, total)
            assert found["epochs"] + found["finetune_epochs"] == total
            assert found["epochs"] >= 1


def test_given_fine_tuning_epochs_take_precedence() -> None:
    entrants = Contender("slimstart", "paper"), Contender("l1"), Contender("uniform"), Contender("slimstart")
    given = [plan(entrant, BASE, 40, finetune_epochs=3) for entrant in entrants]
    assert [(one["epochs"], one["finetune_epochs"]) for one in given] == [(37, 3), (37, 3), (40, 0), (40, 0)]


def test_all_runs_seed_by_seed_and_dense_once() -> None:
    found = trials(
        BASE,
        ["dense", "uniform", "slimstart:pge"],
        ["flops=0.10", "params=0.05 + flops=0.20"],
        num_seeds=2,
        total_epochs=34,
    )
    names = [
        "dense-seed0",
        "uniform-flops-0.1-seed0",
        "slimstart-pge-flops-0.1-seed0",
        "uniform-params-0.05-flops-0.2-seed0",
        "slimstart-pge-params-0.05-flops-0.2-seed0",
    ]
    assert [trial.name for trial in found] == names + [name.replace("seed0", "seed1") for name in names]
    assert all(re.fullmatch(r"[\w.-]+", trial.name) for trial in found)
    recipes = {trial.name: trial.recipe for trial in found}
    assert {recipe.total_epochs for recipe in recipes.values()} == {34}
    assert recipes["dense-seed1"] == Recipe(
        model="small", lr=0.2, finetune_lr=0.003, epochs=34, method="dense", budget=None, seed=1
    )
    assert recipes["slimstart-pge-flops-0.1-seed0"] == Recipe(
        model="small",
        lr=0.2,
        finetune_lr=0.003,
        epochs=30,
        finetune_epochs=4,
        policy="paper",
        estimator="pge",
        budget="flops=0.1",
    )


def test_the_default_number_of_epochs_includes_fine_tuning() -> None:
    uniform, ours = trials(preset("vgg16-cifar10"), ["uniform", "slimstart"], ["flops=0.1"])
    assert (uniform.recipe.epochs, uniform.recipe.finetune_epochs) == (340, 0)
    assert (ours.recipe.epochs, ours.recipe.finetune_epochs) == (300, 40)


def test_given_retraining_settings_take_precedence() -> None:
    given = {"finetune_epochs": 6, "finetune_lr": 0.5, "rounds": 3}
    found = trials(BASE, ["slimstart:paper", "uniform", "l1"], ["flops=0.1"], total_epochs=10, retraining=given)
    ours = found[0].recipe
    assert (ours.epochs, ours.finetune_epochs, ours.finetune_lr) == (4, 6, 0.5)
    assert [trial.recipe.rounds for trial in found] == [1, 1, 3]  # for methods that prune


def test_trials_of_shallow_are_of_that_contender_alone() -> None:
    base = merged(BASE, {"model": "vgg16"})
    shallow, uniform = trials(base, ["shallow", "uniform"], ["flops=0.1"], retraining={"trial_epochs": 2})
    assert (shallow.recipe.trial_epochs, uniform.recipe.trial_epochs) == (2, None)


@pytest.mark.parametrize("name", [*METHODS, "slimstart:gumbel", "l1:uniform", "soft:uniform"])
def test_every_method_makes_a_recipe(name: str) -> None:
    base = merged(BASE, {"model": "vgg16"})  # which has shallower siblings
    (trial,) = trials(base, [name], ["flops=0.1"], total_epochs=8)
    assert trial.recipe.method == name.partition(":")[0]
    assert trial.recipe.total_epochs == 8


@pytest.mark.parametrize(
    ("methods", "budgets", "changes", "message"),
    [
        (["magic"], ["flops=0.1"], {}, f"`methods` has 'magic'; there are {', '.join(METHODS)}"),
        (["random:wide"], ["flops=0.1"], {}, "'random:wide', but random has no variants; slimstart has"),
        (["l1:front_heavy"], ["flops=0.1"], {}, "'front_heavy', which only the method uniform has"),
        (["slimstart:magic"], ["flops=0.1"], {}, "slimstart:magic in `methods`: `estimator` is 'magic'; .* one of pge"),
        (["slimstart:"], ["flops=0.1"], {}, "`estimator` is ''"),
        (["l1:magic"], ["flops=0.1"], {}, "l1:magic in `methods`: `protocol` is 'magic'; it must be one of original"),
        ([], ["flops=0.1"], {}, "`methods` is empty"),
        (["uniform"], [], {}, "`budgets` is empty"),
        (["uniform"], ["flops"], {}, "`budget` is 'flops'; it must be channels=F"),
        (
            ["uniform"],
            ["flops=0.1", "flops=0.10"],
            {},
            "uniform-flops-0.1-seed0 are the same",
        ),
        (["uniform", "uniform"], ["flops=0.1"], {}, "are the same run; name each method and budget once"),
        (
            ["slimstart:paper", "slimstart:vr_pge"],
            ["flops=0.1"],
            {},
            "slimstart-vr_pge-flops-0.1-seed0 and slimstart-paper-flops-0.1-seed0 are the same run",
        ),
        (["uniform"], ["flops=0.1"], {"num_seeds": 0}, "`seeds` is 0; it must be at least 1"),
        (["uniform"], ["flops=0.1"], {"total_epochs": 0}, "uniform in `methods`: `epochs` is 0"),
        (
            ["slimstart:paper"],
            ["flops=0.1"],
            {"total_epochs": 4, "retraining": {"finetune_epochs": 4}},
            "slimstart:paper in `methods`: `epochs` is 0",
        ),
    ],
)
def test_wrong_comparisons_are_refused(
    methods: list[str], budgets: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trials(BASE, methods, budgets, **changes)


def test_changed_settings_of_a_run_are_named(tmp_path: Path) -> None:
    first = trials(BASE, ["uniform", "slimstart"], ["flops=0.1"])
    Run(tmp_path / first[1].name).create(first[1].recipe)
    refuse_changes(first, tmp_path)
    changed = trials(BASE, ["uniform", "slimstart"], ["flops=0.1"], total_epochs=6)
    message = r"slimstart-flops-0.1-seed0 began with other settings: `epochs` was 12 and is 6; choose another --out"
    with pytest.raises(ConfigError, match=message):
        refuse_changes(changed, tmp_path)

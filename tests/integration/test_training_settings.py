"""Optimizers, averages of weights and augmentation as settings of a recipe: what they do, and runs that are resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slimstart.lab.recipes.presets import preset
from slimstart.lab.recipes.recipe import Recipe, as_toml, merged, read
from slimstart.lab.run.evaluation import evaluate
from slimstart.lab.run.method import Loss, make_optimizer
from tests.integration.test_program import SELDOM, TINY, Killed, Killer, outcome, started

MODERN = Recipe(
    model=TINY.model,
    budget="flops=0.4",
    epochs=3,
    batch_size=1000,
    optimizer="adamw",
    lr=5e-3,
    ema_decay=0.9,
    mixup=0.2,
    cutmix=1.0,
    rand_augment=2,
    label_smoothing=0.1,
    resample_every=1,
    settle_at=0.67,
)


def test_optimizers_are_those_of_pytorch_with_the_settings_of_the_recipe() -> None:
    network, make = nn.Linear(3, 2), lambda **settings: make_optimizer(Recipe(**settings), network)
    sgd = make()
    assert type(sgd) is torch.optim.SGD
    assert (sgd.defaults["lr"], sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0.1, 0.9, 5e-4)
    assert not sgd.defaults["nesterov"]
    nesterov = make(nesterov=True, momentum=0.8)
    assert (nesterov.defaults["nesterov"], nesterov.defaults["momentum"]) == (True, 0.8)
    adamw = make(optimizer="adamw", beta2=0.95, eps=1e-6)
    assert type(adamw) is torch.optim.AdamW
    assert (adamw.defaults["lr"], adamw.defaults["betas"], adamw.defaults["eps"]) == (1e-3, (0.9, 0.95), 1e-6)
    assert adamw.defaults["weight_decay"] == 0.01
    adam = make(optimizer="adam", weight_decay=1e-4)
    assert type(adam) is torch.optim.Adam
    assert (adam.defaults["betas"], adam.defaults["weight_decay"]) == ((0.9, 0.999), 1e-4)
    rmsprop = make(optimizer="rmsprop", momentum=0.9)
    assert type(rmsprop) is torch.optim.RMSprop
    assert (rmsprop.defaults["alpha"], rmsprop.defaults["momentum"], rmsprop.defaults["eps"]) == (0.99, 0.9, 1e-8)


def test_another_optimizer_drops_the_settings_of_the_former_one(tmp_path: Path) -> None:
    base = preset("vgg16-cifar10")
    other = merged(base, {"optimizer": "adamw", "beta1": 0.8})
    assert (other.lr, other.weight_decay, other.momentum, other.beta1, other.beta2) == (1e-3, 0.01, None, 0.8, 0.999)
    assert merged(other, {"lr": 0.2}).lr == 0.2
    assert merged(other, {"optimizer": "sgd"}).momentum == 0.9
    (tmp_path / "recipe.toml").write_text(as_toml(MODERN))
    assert read(tmp_path / "recipe.toml", MODERN.model) == MODERN


def test_the_loss_of_mixed_labels_is_that_of_a_slow_reference() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1.0, 0, 0], [0.3, 0.7, 0], [0, 0.5, 0.5], [0, 0, 1]])
    loss = Loss(Recipe(label_smoothing=0.1))(nn.Identity(), logits, targets)
    expected = 0.0
    for row, target in zip(logits.double(), targets.double(), strict=True):
        for c in range(3):
            expected -= (0.9 * float(target[c]) + 0.1 / 3) * float(row[c] - row.exp().sum().log()) / 4
    assert float(loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("method", ["slimstart", pytest.param("uniform", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_ends_as_one_that_is_not(
    tmp_path: Path, method: str, differences: Callable[[Any, Any], list[str]]
) -> None:
    recipe = merged(MODERN, {"method": method})
    record = started(tmp_path / "whole", recipe, place=SELDOM).train()
    assert (len({epoch.flops_ratio for epoch in record.history}) > 1) == (method == "slimstart")
    for stops, steps in enumerate((2, 5, 4)):  # in the search, where channels leave and come back, and after it
        torch.manual_seed(stops)
        with pytest.raises(Killed):
            started(tmp_path / "parts", recipe, watcher=Killer(steps)).train()
    started(tmp_path / "parts", recipe).train()
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "parts")) == []
    assert record.flops_ratio <= 0.4


@pytest.mark.parametrize("settings", [{}, {"method": "dense"}, {"method": "uniform", "ema_decay": None}])
def test_the_average_is_what_is_evaluated_and_saved(tmp_path: Path, settings: dict[str, Any]) -> None:
    program = started(tmp_path / "run", merged(MODERN, {"epochs": 1, "settle_at": 1.0, **settings}), place=SELDOM)
    program._train_epoch()
    network = program.method.snapshot(program.task.calibration_batches())
    _, accuracy = evaluate(network, program.task.data, "float32")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    epoch = program._end_epoch()
    assert epoch.test_accuracy == accuracy
    record = program._finish()
    assert record.accuracy == accuracy
    optimized = {id(p) for group in program.method.optimizer.param_groups for p in group["params"]}
    finished = program.method.finish([])
    assert all(torch.equal(tensor, before[name]) for name, tensor in finished.state_dict().items())
    assert all(id(p) in optimized for p in finished.parameters())


@pytest.mark.parametrize(
    "settings", [{"optimizer": "rmsprop", "lr": 1e-3}, {"optimizer": "adam", "lr": 1e-3}, {"nesterov": True}]
)
def test_every_optimizer_trains(tmp_path: Path, settings: dict[str, Any]) -> None:
    recipe = merged(TINY, {"policy": "equal_worth", "finetune_epochs": 0, "settle_at": 1.0, "epochs": 4, **settings})
    record = started(tmp_path / "run", recipe, place=SELDOM).train()
    assert record.history[-1].train_loss < record.history[0].train_loss
    assert record.config["optimizer"] == settings.get("optimizer", "sgd")

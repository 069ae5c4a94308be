"""The method shallow: trials on held-out training images, the training of the best, and the record of both."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slimstart import flops
from slimstart.errors import BudgetError, ConfigError
from slimstart.lab import records
from slimstart.lab.cli import network_commands
from slimstart.lab.models import registry, siblings
from slimstart.lab.models.feed_forward import VGG
from slimstart.lab.models.layers import Stages
from slimstart.lab.recipes.recipe import Recipe, merged
from slimstart.lab.run.run_folder import Run
from tests.integration.test_program import SELDOM, Killed, Killer, outcome, started

OWN = Stages((2, 2), (8, 16))


def made(**settings: Any) -> Recipe:
    """A recipe of the method, once the tiny family is known."""
    own = {"model": "small", "method": "shallow", "budget": "flops=0.4", "epochs": 2, "trial_epochs": 1}
    return Recipe(**{**own, "batch_size": 600, "lr": 0.1, **settings})


@pytest.fixture(autouse=True)
def _tiny_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with siblings that trains in no time: its first layer reads every fourth pixel."""

    def make(num_classes: int, in_channels: int, width: float = 1.0, stages: Stages = OWN) -> nn.Module:
        layers = [[channels] * depth for depth, channels in zip(stages.depths, stages.channels, strict=True)]
        network = VGG(layers, num_classes, in_channels, width)
        network.features[0].stride = (4, 4)  # type: ignore[union-attr]
        return network

    monkeypatch.setitem(registry.MODELS, "small", make)
    monkeypatch.setitem(siblings.__globals__["STAGES"], "small", OWN)
    monkeypatch.setitem(siblings.__globals__["DEPTHS"], "small", ("1,1", "2,2"))


@pytest.mark.slow
def test_the_best_of_all_trials_is_trained_and_its_cost_said(tmp_path: Path) -> None:
    program = started(tmp_path / "run", made(), place=SELDOM)
    record = program.train()
    assert record == records.read(tmp_path / "run")
    choosing = record.choosing
    assert choosing is not None
    assert [one.stages for one in choosing.candidates] == ["1,1", "1,1:late", "2,2", "2,2:late"]
    assert choosing.chosen == max(choosing.candidates, key=lambda one: one.accuracy).stages
    assert (choosing.held_out_images, choosing.epochs) == (600, 4)  # a tenth of 6,000; one epoch for each of four
    for one in choosing.candidates:
        trial = records.read(tmp_path / "run" / "trials" / one.stages.replace(",", "-").replace(":", "-"))
        assert (one.accuracy, one.flops, one.params) == (trial.accuracy, trial.flops, trial.params)
        assert (trial.config["validation"], trial.config["stages"], trial.epochs) == (600, one.stages, 1)
        assert (trial.choosing, trial.seed) == (None, record.seed)
        assert 0.3 * record.dense_flops < one.flops <= 0.4 * record.dense_flops
        steps = (6000 - 600) // 600
        assert steps * 600 * 2 * one.flops < one.train_flops <= steps * 600 * 3 * one.flops
    assert choosing.train_flops == sum(one.train_flops for one in choosing.candidates)
    assert record.train_flops == sum(epoch.train_flops for epoch in record.history) + choosing.train_flops
    assert record.train_seconds > choosing.train_seconds > 0
    assert (record.epochs, record.config["stages"]) == (2, None)
    chosen = next(one for one in choosing.candidates if one.stages == choosing.chosen)
    assert record.flops == chosen.flops
    convolutions = 2 if choosing.chosen.startswith("1,1") else 4
    assert len(record.layers) == convolutions + 1
    network = network_commands._finished(tmp_path / "run", made())
    assert flops(network, program.task.example) == record.flops


@pytest.mark.slow
def test_a_run_that_is_stopped_in_its_trials_ends_as_one_that_is_not(
    tmp_path: Path, differences: Callable[[Any, Any], list[str]]
) -> None:
    def alike(folder: Path) -> tuple[dict[str, Any], bytes]:
        record, network = outcome(folder)
        del record["choosing"]["train_seconds"]
        return record, network

    started(tmp_path / "whole", made(), place=SELDOM).train()
    stops = 0
    for steps in (3, 11, 9, 12, 4):
        torch.manual_seed(stops)
        try:
            started(tmp_path / "parts", made(), watcher=Killer(steps)).train()
            break
        except Killed:
            stops += 1
    assert stops >= 3
    if not Run(tmp_path / "parts").finished:
        started(tmp_path / "parts", made()).train()
    assert differences(alike(tmp_path / "whole"), alike(tmp_path / "parts")) == []


def test_named_stages_are_trained_without_trials(tmp_path: Path) -> None:
    recipe = made(stages="1,1:late", trial_epochs=None)
    record = started(tmp_path / "run", recipe, place=SELDOM).train()
    assert record.choosing is None
    assert not (tmp_path / "run" / "trials").exists()
    first, second, _ = (layer.width for layer in record.layers)
    assert second / first == pytest.approx(2**1.3, rel=0.3)
    assert flops(network_commands._finished(tmp_path / "run", recipe), torch.zeros(1, 1, 28, 28)) == record.flops


def test_siblings_that_cannot_meet_the_budget_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(siblings.__globals__["DEPTHS"], "small", ("1,1", "9,9"))
    recipe = made(budget="flops=0.05", epochs=1)
    record = started(tmp_path / "run", recipe, place=SELDOM).train()
    assert record.choosing is not None
    assert [one.stages for one in record.choosing.candidates] == ["1,1", "1,1:late"]
    with pytest.raises(BudgetError):
        started(tmp_path / "tiny", dataclasses.replace(recipe, budget="flops=0.0001"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "tests.tiny_networks:with_dropout"}, "`model` is .* which has no siblings; choose one of vgg16"),
        ({"validation": 100}, "`validation` is 100, but the method shallow chooses on training images that"),
        ({"stages": "1,1"}, "`trial_epochs` is 1, but `stages` leaves nothing to try"),
        ({"stages": "1,1,1"}, "`stages` is '1,1,1'; it must be 2 numbers"),
        ({"method": "uniform"}, "`trial_epochs` is 1, but only the method shallow has it"),
        ({"trial_epochs": 0}, "`trial_epochs` is 0; it must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_contradict_the_method(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**settings)
    assert merged(made(), {"method": "uniform"}).trial_epochs is None

"""Learning rate schedules step by step, and refused schedules and settings of methods."""

from typing import Any

import pytest

from slimstart.errors import ConfigError
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.recipes.schedules import learning_rate, parse_schedule


def rates(steps_per_epoch: int = 4, **settings: Any) -> list[float]:
    recipe = Recipe(**settings)
    return [learning_rate(recipe, step, steps_per_epoch) for step in range(recipe.total_epochs * steps_per_epoch)]


def test_steps_by_hand() -> None:
    found = rates(epochs=4, lr=0.2, schedule="steps:0.5,0.75x0.1")
    assert found == pytest.approx([0.2] * 8 + [0.02] * 4 + [0.002] * 4)
    found = rates(epochs=2, lr=1.0, schedule="steps:0.3x0.5")  # of 8 steps: from the one that begins at 3/8 on
    assert found == pytest.approx([1.0] * 3 + [0.5] * 5)


def test_schedule_steps_are_fractions_of_the_epochs_after_warm_up() -> None:
    found = rates(epochs=3, lr=1.0, warmup_epochs=1.0, schedule="steps:0.5x0.1")
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 4 + [0.1] * 4)


def test_fine_tuning_has_its_own_schedule() -> None:
    settings = {"epochs": 1, "lr": 1.0, "schedule": "constant", "finetune_epochs": 2, "finetune_lr": 0.5}
    assert rates(**settings) == [1.0] * 4 + [0.5] * 8
    found = rates(**settings, finetune_schedule="steps:0.25,0.5x0.2")
    assert found == pytest.approx([1.0] * 4 + [0.5] * 2 + [0.1] * 2 + [0.02] * 4)
    found = rates(**settings, finetune_schedule="cosine")
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
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
    ],
)
def test_settings_that_a_method_does_not_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings)

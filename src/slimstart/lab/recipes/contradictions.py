"""Problems of the settings of a recipe: values out of range, and settings that contradict each other.

Each problem is one sentence: the setting in backticks, its value, the rule, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from slimstart.errors import ConfigError
from slimstart.graph import COUPLINGS
from slimstart.lab import data, models
from slimstart.lab.methods import OWN_PROTOCOLS, PROTOCOLS, RELAXATIONS
from slimstart.lab.own_code import is_factory
from slimstart.lab.recipes.recipe import (
    METHODS,
    OPTIMIZERS,
    OWN_SETTINGS,
    PRECISIONS,
    SETTINGS,
    own_settings,
    parse_budget,
)
from slimstart.lab.recipes.schedules import parse_schedule
from slimstart.policies import ESTIMATORS, POLICIES, SAMPLINGS

if TYPE_CHECKING:
    from slimstart.lab.recipes.recipe import Recipe

CHOICES: dict[str, tuple[str | None, ...]] = {
    "data": data.NAMES,
    "method": METHODS,
    "policy": tuple(POLICIES),
    "coupling": (None, *COUPLINGS),
    "estimator": (None, *ESTIMATORS, *RELAXATIONS),
    "sampling": (None, *SAMPLINGS),
    "protocol": PROTOCOLS,
    "precision": PRECISIONS,
    "optimizer": tuple(OPTIMIZERS),
}
# Rules of numbers: the settings that have to follow each, and what a value is asked.
RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    (
        "epochs trial_epochs batch_size eval_every resample_every align num_masks rounds",
        "must be at least 1",
        lambda value: value >= 1,
    ),
    (
        "width structure_lr lr eps finetune_lr",
        "must be positive and finite",
        lambda value: 0 < value < math.inf,
    ),
    (
        "depth penalty weight_decay warmup_epochs finetune_epochs validation seed mixup cutmix rand_augment",
        "must not be negative or infinite",
        lambda value: 0 <= value < math.inf,
    ),
    ("settle_at label_smoothing momentum", "must be in [0, 1]", lambda value: 0 <= value <= 1),
    ("beta1 beta2", "must be at least 0 and less than 1", lambda value: 0 <= value < 1),
    ("ema_decay", "must be between 0 and 1; leave it out for no average", lambda value: 0 < value < 1),
)
LARGE = 2**63  # as in TOML, and for PyTorch's generators


# Methods that train one network, so that its weights have an average.
AVERAGED = ("slimstart", "dense", "uniform", "shallow", "random")


def problems(recipe: Recipe) -> Iterator[str]:
    """Everything that is wrong, one sentence each."""
    integers = {name: value for name, value in vars(recipe).items() if isinstance(value, int)}
    if too_large := [name for name, value in integers.items() if not -LARGE <= value < LARGE]:
        for name in too_large:  # without the value: Python does not print integers of some thousand digits
            yield f"`{name}` is an integer of {integers[name].bit_length()} bits; it must be less than 2**63"
        return
    yield from _values(recipe)
    yield from _of_the_policy(recipe)
    yield from _of_the_method(recipe)
    yield from _of_the_training(recipe)


def _values(recipe: Recipe) -> Iterator[str]:
    """Settings that are wrong by themselves."""
    for name, known in CHOICES.items():
        if getattr(recipe, name) not in known and not (name == "data" and is_factory(recipe.data)):
            yield f"`{name}` is {getattr(recipe, name)!r}; it must be one of {', '.join(filter(None, known))}"
    for name in ("schedule", "finetune_schedule"):
        try:
            parse_schedule(getattr(recipe, name))
        except ValueError as error:
            yield f"`{name}` is {getattr(recipe, name)!r}; {error}"
    if recipe.budget is not None:
        try:
            parse_budget(recipe.budget)
        except ValueError as error:
            yield str(error)
    for names, rule, holds in RANGES:
        for name in names.split():
            value = getattr(recipe, name)
            if value is not None and not holds(value):
                yield f"`{name}` is {value}; it {rule}"


def _of_the_policy(recipe: Recipe) -> Iterator[str]:
    if recipe.method != "slimstart" or recipe.policy not in POLICIES:
        return
    if POLICIES[recipe.policy].learns_from == "gradients" and recipe.coupling not in (None, "stream"):
        yield (
            f"`coupling` is {recipe.coupling!r}, but the policy {recipe.policy} needs stream; choose stream, or leave "
            "it out"
        )
    for name in OWN_SETTINGS:
        if (value := getattr(recipe, name)) is not None and name not in own_settings(recipe.policy):
            owners = ", ".join(policy for policy in POLICIES if name in own_settings(policy))
            yield f"`{name}` is {value!r}, but only the policy {owners} has it; choose that policy, or leave it out"


def _of_the_method(recipe: Recipe) -> Iterator[str]:
    if recipe.method == "dense" and recipe.budget is not None:
        yield f"`budget` is {recipe.budget!r}, but the method dense has no budget; leave it out"
    if recipe.method != "dense" and recipe.budget is None:
        yield f"`budget` is missing; the method {recipe.method} needs one, such as flops=0.10"
    if recipe.method != OWN_PROTOCOLS.get(recipe.protocol, recipe.method):
        has = [name for name in PROTOCOLS if OWN_PROTOCOLS.get(name, recipe.method) == recipe.method]
        yield (
            f"`protocol` is {recipe.protocol!r}, which only the method {OWN_PROTOCOLS[recipe.protocol]} has; "
            f"{recipe.method} has {', '.join(has)}"
        )
    yield from _of_siblings(recipe)
    if recipe.full_model_device not in (None, "cpu"):
        yield (
            f"`full_model_device` is {recipe.full_model_device!r}; it must be cpu, or left out to keep the dense "
            "network on the device that trains"
        )
    elif recipe.full_model_device is not None and recipe.method != "slimstart":
        yield (
            f"`full_model_device` is 'cpu', but the method {recipe.method} has no dense network besides the one that "
            "it trains; leave it out, or choose the method slimstart"
        )
    elif recipe.full_model_device is not None and recipe.estimator in RELAXATIONS:
        yield (
            f"`full_model_device` is 'cpu', but the estimator {recipe.estimator} trains the dense network; leave it "
            f"out, or choose one of {', '.join(ESTIMATORS)}"
        )
    if recipe.width != 1 and (is_factory(recipe.model) or recipe.model.startswith("timm:")):
        yield (
            f"`width` is {recipe.width}, but it only applies to networks of ours, and {recipe.model} is not one; leave "
            "it out, and build the network with the widths that you want"
        )


def _of_siblings(recipe: Recipe) -> Iterator[str]:
    """Problems of the settings of the method shallow."""
    if recipe.method != "shallow":
        for name in ("stages", "trial_epochs"):
            if (value := getattr(recipe, name)) is not None:
                yield f"`{name}` is {value!r}, but only the method shallow has it; leave it out, or choose that method"
        return
    try:
        models.parse_stages(recipe.model, recipe.stages or models.siblings(recipe.model)[0])
    except ConfigError as error:
        yield str(error)
    if recipe.stages is None and recipe.validation:
        yield (
            f"`validation` is {recipe.validation}, but the method shallow chooses on training images that it "
            "holds out itself; leave it out, or name the `stages`"
        )
    if recipe.stages is not None and recipe.trial_epochs is not None:
        yield f"`trial_epochs` is {recipe.trial_epochs}, but `stages` leaves nothing to try; leave one of them out"


def _of_the_training(recipe: Recipe) -> Iterator[str]:
    own = OPTIMIZERS.get(recipe.optimizer, OPTIMIZERS["sgd"])
    for name in SETTINGS:
        if name not in own and getattr(recipe, name) is not None:
            owners = ", ".join(optimizer for optimizer, settings in OPTIMIZERS.items() if name in settings)
            yield (
                f"`{name}` is {getattr(recipe, name)}, but the optimizer {recipe.optimizer} has no such setting; leave "
                f"it out, or choose {owners}"
            )
    if recipe.optimizer == "sgd" and recipe.nesterov and not recipe.momentum:
        yield f"`nesterov` needs momentum, and `momentum` is {recipe.momentum}; leave `nesterov` out, or raise it"
    if recipe.ema_decay is not None and recipe.method not in AVERAGED:
        yield (
            f"`ema_decay` is {recipe.ema_decay}, but the method {recipe.method} trains several networks, whose weights "
            f"have no average; leave it out, or choose one of {', '.join(AVERAGED)}"
        )
    elif recipe.ema_decay is not None and recipe.method == "slimstart" and _draws_networks(recipe):
        yield (
            f"`ema_decay` is {recipe.ema_decay}, but the policy {recipe.policy} trains another sub-network at each "
            "step, and the average over them is none of them; leave it out, or choose the policy equal_worth"
        )
    elif recipe.ema_decay is not None and recipe.full_model_device is not None:
        yield (
            f"`ema_decay` is {recipe.ema_decay}, but averages of weights in the host's memory are not supported; leave "
            "it out, or `full_model_device`"
        )
    if recipe.rand_augment_magnitude is not None:
        if not recipe.rand_augment:
            yield (
                f"`rand_augment_magnitude` is {recipe.rand_augment_magnitude}, but `rand_augment` is 0; leave the "
                "magnitude out, or set the number of operations, such as 2"
            )
        elif not 0 <= recipe.rand_augment_magnitude <= 30:
            yield f"`rand_augment_magnitude` is {recipe.rand_augment_magnitude}; it must be in [0, 30]"
    if recipe.warmup_epochs >= recipe.epochs:
        yield f"`warmup_epochs` is {recipe.warmup_epochs}; it must be less than `epochs`, {recipe.epochs}"
    if recipe.rounds > max(1, recipe.finetune_epochs):
        yield (
            f"`rounds` is {recipe.rounds}, but each round needs an epoch of fine-tuning, and `finetune_epochs` is "
            f"{recipe.finetune_epochs}"
        )


def _draws_networks(recipe: Recipe) -> bool:
    return recipe.policy in POLICIES and POLICIES[recipe.policy].learns_from == "losses"

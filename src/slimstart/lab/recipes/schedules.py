r"""The learning rate of the weights as a pure function of the step, so that a checkpoint need not hold it.

A linear warm-up, then a schedule over `epochs`, then another one for fine-tuning. The learning rate of s falls along a
cosine too; the policy does that by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from slimstart.lab.recipes.recipe import Recipe

Schedule = Callable[[float], float]
"""From the part of the steps that is done, in [0, 1), to the factor of the learning rate."""


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of step `step`, counted from 0 over the whole run."""
    warmup = recipe.warmup_epochs * steps_per_epoch
    total = recipe.epochs * steps_per_epoch
    if step >= total:
        done = (step - total) / (recipe.finetune_epochs * steps_per_epoch)
        return recipe.finetune_lr * parse_schedule(recipe.finetune_schedule)(done)
    if step < warmup:
        return recipe.lr * (step + 1) / (warmup + 1)
    return recipe.lr * parse_schedule(recipe.schedule)((step - warmup) / (total - warmup))


@cache
def parse_schedule(text: str) -> Schedule:
    """`cosine`, `constant`, or `steps:0.5,0.75x0.1`: times 0.1 at one half of the steps, and again at three quarters.

    Raises:
        ValueError: it is none of these.
    """
    if text == "cosine":
        return lambda done: 0.5 * (1 + math.cos(math.pi * done))
    if text == "constant":
        return lambda done: 1.0
    kind, _, rest = text.partition(":")
    places, _, factor = rest.partition("x")
    try:
        moments, each = [float(place) for place in places.split(",")], float(factor)
        if kind == "steps" and moments == sorted(moments) and moments[0] > 0 and moments[-1] < 1 and 0 < each < 1:
            return lambda done: each ** sum(done >= moment for moment in moments)
    except ValueError:
        pass
    raise ValueError("it must be cosine, constant, or steps such as steps:0.5,0.75x0.1")

r"""The learning rate of the weights as a pure function of the step: nothing to save, nothing to restore.

A linear warm-up, a cosine to zero over `epochs`, and a constant for fine-tuning. The learning rate of s falls along a
cosine too; the policy does that by itself.
"""

from __future__ import annotations

import math

from slimstart.recipes.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of step `step`, counted from 0 over the whole run."""
    warmup = recipe.warmup_epochs * steps_per_epoch
    total = recipe.epochs * steps_per_epoch
    if step >= total:
        return recipe.finetune_lr
    if step < warmup:
        return recipe.lr * (step + 1) / (warmup + 1)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

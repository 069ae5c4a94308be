"""Time of a step: that of a method, of the dense network, and of the uniform network of equal FLOPs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from slimstart.devices import device_of
from slimstart.errors import BudgetError
from slimstart.lab.methods import RELAXATIONS, uniform_of_flops
from slimstart.lab.recipes.recipe import Recipe, merged
from slimstart.lab.run.make_method import Batch, Loss, Search, make_optimizer
from slimstart.lab.run.task import Task
from slimstart.lab.run.timing import Step, Stopwatch, compare, plain_step, search_step
from slimstart.policies import get_policy
from slimstart.policies.widths import ALIGN
from slimstart.steps import PlainTraining

logger = logging.getLogger(__name__)
WARM_UP = 3  # steps before the first measurement, in which graphs are captured
ROUNDS = 20  # turns of each network
LONGEST = 10.0  # seconds, after which no new round begins


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds per step; None for what a method does not have. The total includes optimizer and resampling."""

    total: float
    forward: float
    backward: float
    dense: float | None
    narrow: float | None


def has_step_times(recipe: Recipe) -> bool:
    """Whether there is one kind of step to measure; other methods train one network after the other."""
    ours = recipe.method == "slimstart" and recipe.estimator not in RELAXATIONS
    return ours or recipe.method in ("dense", "uniform")


def measured(task: Task, own_flops: int) -> StepTimes | None:
    """Step times, with those of the dense and the uniform network; None where not asked for, or not possible.

    Args:
        own_flops: of the finished network.
    """
    # With several processes there are none, for one of them alone cannot take a step.
    if not task.place.step_times or not has_step_times(task.recipe) or task.ranks.size > 1:
        return None
    batch = next(iter(task.train.epoch(0)))
    try:
        return step_times(task.recipe, task.make_model, batch, own_flops, task.dense.flops, task.place.engine)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in f"{type(error).__name__} {error}".lower():
            raise
        # The dense network may not fit into memory where ours does.
        logger.warning(
            "step times are not measured: there is not enough memory for the dense network in addition to ours"
        )
        return None


def step_times(
    recipe: Recipe,
    make_model: Callable[[], nn.Module],
    batch: Batch,
    own_flops: int,
    dense_flops: int,
    engine: str = "auto",
    rounds: int = ROUNDS,
) -> StepTimes:
    """Measure steps of fresh networks on one batch.

    Args:
        own_flops: FLOPs of the finished network, and of the uniform one.
        dense_flops: of the dense one.
        engine: of all of them.
    """
    steps: dict[str, Step] = {}
    every = recipe.resample_every or 1
    if recipe.full_model_device is None:  # otherwise it may be larger than the device
        steps["dense"] = _plain_step(recipe, make_model(), batch, engine)
    if recipe.method != "dense":
        with contextlib.suppress(BudgetError):  # whole streams may cost more than the finished network
            small = _uniform(make_model(), batch, own_flops, dense_flops, recipe.align or ALIGN)
            steps["uniform"] = _plain_step(recipe, small, batch, engine)
    if recipe.method == "slimstart":
        # A policy that learns from gradients ends its search early: its steps are steps without draws.
        draws = get_policy(recipe.policy).learns_from == "losses"
        held_long = draws and every > 1  # then draws are made by hand, so that a held step makes none
        endless = merged(recipe, {"resample_every": 1 if draws and not held_long else 10**9})
        search = Search(endless, make_model(), batch[0][:1], steps_per_epoch=1000, engine=engine)
        if not draws:
            search.sparse.settle([batch], search.loss_fn)
        steps["slimstart"] = _search_step(search, batch, draw=held_long)
        if held_long:
            steps["held"] = _search_step(search, batch, draw=False)
    for step in steps.values():
        for _ in range(WARM_UP):
            step(Stopwatch(batch[0].device, in_parts=False))
    times = compare(steps, batch[0].device, rounds, LONGEST)
    own = times[recipe.method]
    if "held" in times:  # a window is one first step, and the rest are held
        held = times["held"]
        own = {lap: (time + (every - 1) * held[lap]) / every for lap, time in own.items()}
    dense_ms, narrow_ms = (times[name]["total"] if name in times else None for name in ("dense", "uniform"))
    return StepTimes(own["total"], own["forward"], own["backward"], dense_ms, narrow_ms)


def _uniform(model: nn.Module, batch: Batch, own_flops: int, dense_flops: int, align: int) -> nn.Module:
    """The uniform network of these FLOPs, on the device of the batch; the dense one is freed."""
    example = batch[0][:1].to(device_of(model))
    return uniform_of_flops(model, example, own_flops, dense_flops, align).to(batch[0].device)


def _plain_step(recipe: Recipe, network: nn.Module, batch: Batch, engine: str) -> Step:
    optimizer, loss_fn = make_optimizer(recipe, network), Loss(recipe)
    training = PlainTraining(network, optimizer, engine=engine)

    def step(watch: Stopwatch) -> None:
        if not watch.in_parts:
            training.step(loss_fn, *batch)
        else:
            plain_step(network, optimizer, loss_fn, batch, watch)

    return step


def _search_step(search: Search, batch: Batch, draw: bool) -> Step:
    """A step of Algorithm 1; `draw`: with the draw before it."""
    sparse, loss_fn = search.sparse, search.loss_fn

    def step(watch: Stopwatch) -> None:
        if draw:
            sparse.resample()
            watch.lap("other")
        if not watch.in_parts:
            sparse.step(loss_fn, *batch)
        else:
            search_step(sparse, loss_fn, batch, watch)

    return step

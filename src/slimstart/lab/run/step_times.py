"""Time of a step: that of a method, of the dense network, and of the uniform network of equal FLOPs.

All networks take turns in one process, so that a noisy machine disturbs all.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.devices import device_of
from slimstart.errors import BudgetError
from slimstart.flop_counter import flops
from slimstart.graph import trace
from slimstart.lab.methods import RELAXATIONS, uniform, uniform_of_flops
from slimstart.lab.recipes.recipe import Recipe, make_model, merged
from slimstart.lab.run import environment as surroundings
from slimstart.lab.run.make_method import Batch, Loss, Search, make_optimizer
from slimstart.lab.run.task import Task
from slimstart.policies import get_policy
from slimstart.policies.widths import ALIGN
from slimstart.steps import LossFunction, PlainTraining
from slimstart.training import SparseTraining

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
    learning: float | None = None  # of a step in which the structure is learned, from gradients


def has_step_times(recipe: Recipe) -> bool:
    """Whether there is one kind of step to measure; other methods train one network after the other."""
    ours = recipe.method == "slimstart" and recipe.estimator not in RELAXATIONS
    return ours or recipe.method in ("dense", "uniform")


def measured(task: Task, own_flops: int) -> StepTimes | None:
    """Step times, with those of the dense and the uniform network; None where not asked for, or not possible.

    Args:
        own_flops: FLOPs of the finished network.
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
    learning: bool = False,
) -> StepTimes:
    """Measure steps of fresh networks on one batch.

    Args:
        own_flops: FLOPs of the finished network, and of the uniform one.
        dense_flops: FLOPs of the dense one.
        engine: engine of all networks.
        learning: whether to measure steps in which the structure is learned, too, for policies that learn from
            gradients.
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
            if learning:
                searching = Search(recipe, make_model(), batch[0][:1], steps_per_epoch=1000, engine=engine)
                steps["learning"] = _search_step(searching, batch, draw=False)
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
    learning_ms = times["learning"]["total"] if "learning" in times else None
    return StepTimes(own["total"], own["forward"], own["backward"], dense_ms, narrow_ms, learning_ms)


def bench(
    recipe: Recipe, image_shape: tuple[int, int, int], num_classes: int, device: str, engine: str, rounds: int
) -> tuple[float, StepTimes]:
    """The FLOPs of the uniform network of a recipe's budget, as a fraction of dense, and step times on random images.

    Raises:
        ConfigError, BudgetError: there is no such network, device or engine, or no sub-network within the budget.
    """
    assert recipe.parsed_budget is not None
    place = surroundings.Place(device, engine=engine)
    on = surroundings.find_device(place.device)
    surroundings.set_precision(recipe.precision)
    torch.manual_seed(recipe.seed)
    images = torch.randn(recipe.batch_size, *image_shape, device=on)
    labels = torch.randint(num_classes, (recipe.batch_size,), device=on)

    def make() -> nn.Module:
        model = make_model(recipe.model, num_classes=num_classes, in_channels=image_shape[0])
        return surroundings.suited(model, on, on)

    model, example = make(), images[:1]
    small = uniform(model, trace(model, example, "stream"), recipe.parsed_budget)
    dense, own = flops(model, example), flops(small, example)
    del model, small  # free their memory
    return own / dense, step_times(recipe, make, (images, labels), own, dense, engine, rounds, learning=True)


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


# --- a stopwatch ------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Times of one step and of its parts, in milliseconds.

    Waiting for the device after every part slows a step down, so a watch measures either the total, and waits only at
    the end, or the parts (`in_parts`).
    """

    def __init__(self, device: torch.device, in_parts: bool) -> None:
        self._device, self.in_parts = device, in_parts
        self.parts: dict[str, float] = {}
        self._began = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        """End the part of this name."""
        if self.in_parts:
            now = self._now()
            self.parts[name] = self.parts.get(name, 0.0) + 1e3 * (now - self._began)
            self._began = now

    def stop(self) -> float:
        """Milliseconds since the beginning; of a watch without parts."""
        return 1e3 * (self._now() - self._began)


Step = Callable[[Stopwatch], None]


def compare(
    steps: Mapping[str, Step], device: torch.device, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Median time of every contender as "total", and its parts.

    Args:
        steps: each runs one training step and calls `lap` after each part.
        rounds: measurements of each contender in each way, after one round of warm-up ...
        seconds: ... but no new round begins after this time, once there are two.
    """
    totals: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    began = time.perf_counter()
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() - began > seconds:
            break
        for name, step in steps.items():
            whole = Stopwatch(device, in_parts=False)
            step(whole)
            total = whole.stop()
            divided = Stopwatch(device, in_parts=True)
            step(divided)
            if number:
                totals[name].append(total)
                parts[name].append(divided.parts)
    return {name: _divided(statistics.median(totals[name]), parts[name]) for name in steps}


def _divided(total: float, rows: list[dict[str, float]]) -> dict[str, float]:
    medians = {part: statistics.median(row[part] for row in rows) for part in rows[0]}
    share = total / sum(medians.values())
    return {"total": total, **{part: share * time for part, time in medians.items()}}


# --- steps with a stopwatch after each part, which captured steps do not have ----------------------------------------


def plain_step(net: nn.Module, optimizer: Optimizer, loss_fn: LossFunction, batch: Batch, watch: Stopwatch) -> None:
    """A step of a network whose structure does not change."""
    loss = loss_fn(net, *batch)
    watch.lap("forward")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    watch.lap("backward")
    optimizer.step()
    watch.lap("other")


def search_step(sparse: SparseTraining, loss_fn: LossFunction, batch: Batch, watch: Stopwatch) -> None:
    """A step of a search by hand, all forwards in one part."""
    loss = loss_fn(sparse.model, *batch)
    with torch.no_grad():
        references = [loss_fn(net, *batch) for net in sparse.references()]
    watch.lap("forward")
    optimizer = sparse.optimizer
    assert isinstance(optimizer, Optimizer)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    watch.lap("backward")
    optimizer.step()
    if sparse.policy.learns_from == "losses":
        sparse.update(loss, references)
    watch.lap("other")

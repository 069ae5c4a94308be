"""Wall-clock time of training steps: all networks take turns in one process, so that a noisy machine disturbs all.

`plain_step` and `search_step` are steps written out with a stopwatch after each part, which captured steps do not have.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.lab.run.method import Batch
from slimstart.steps import LossFunction
from slimstart.training import SparseTraining

Name = TypeVar("Name")


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


@dataclass(frozen=True)
class Turn:
    """One turn of a contender: a number of steps, and a wait for the device at the end."""

    step: Callable[[], object]
    num_steps: int = 1


def take_turns(
    turns: Mapping[Name, Turn], device: torch.device, rounds: int, seconds: float
) -> dict[Name, tuple[float, ...]]:
    """Milliseconds per step of every contender, turn by turn; all are warm already.

    Args:
        turns: of similar length, so that disturbances of the machine affect all with equal chance.
        rounds: turns of each contender, at least two ...
        seconds: ... but no new round begins after this time, once there are two.
    """
    times: dict[Name, list[float]] = {name: [] for name in turns}
    began = time.perf_counter()
    for number in range(rounds):
        if number > 1 and time.perf_counter() - began > seconds:
            break
        for name, turn in turns.items():
            watch = Stopwatch(device, in_parts=False)
            for _ in range(turn.num_steps):
                turn.step()
            times[name].append(watch.stop() / turn.num_steps)
    return {name: tuple(found) for name, found in times.items()}


def spread(times: Sequence[float]) -> tuple[float, float]:
    """Their 10th and 90th percentile; of two times at least."""
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return tenths[0], tenths[-1]


# --- steps with a stopwatch -------------------------------------------------------------------------------------------


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

"""Step times of several networks that take turns in one process, so that a noisy machine disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from slimstart.lab.run.step_times import Stopwatch

Name = TypeVar("Name")


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

"""Wall-clock time of training steps: all contenders in one process, in turns, so that a noisy machine disturbs all."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch


class Stopwatch:
    """Laps of one step, by name, in milliseconds; each lap waits until the device has done its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.laps: dict[str, float] = {}
        self._began = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        now = self._now()
        self.laps[name] = self.laps.get(name, 0.0) + 1e3 * (now - self._began)
        self._began = now


Step = Callable[[Stopwatch], None]


def compare(
    steps: Mapping[str, Step], device: torch.device, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Median time of every lap of every contender, and their sum as "total".

    Args:
        steps: each runs one training step and calls `lap` behind each part of it.
        rounds: each contender runs so often, after one round to warm up ...
        seconds: ... but no new round begins when so much time has passed, once there are two.
    """
    measured: dict[str, list[dict[str, float]]] = defaultdict(list)
    began = time.perf_counter()
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() - began > seconds:
            break
        for name, step in steps.items():
            watch = Stopwatch(device)
            step(watch)
            if number:
                measured[name].append({**watch.laps, "total": sum(watch.laps.values())})
    return {
        name: {lap: statistics.median(one[lap] for one in rows) for lap in rows[0]} for name, rows in measured.items()
    }

"""Wall-clock time of training steps: all contenders in one process, in turns, so that a noisy machine disturbs all."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch


class Stopwatch:
    """Times of one step in milliseconds, by the parts that it is made of.

    Waiting for the device behind every part would slow down the whole, so a watch measures either the total, and then
    waits at the end alone, or the parts.
    """

    def __init__(self, device: torch.device, in_parts: bool) -> None:
        self._device, self._in_parts = device, in_parts
        self.parts: dict[str, float] = {}
        self._began = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        """The part of this name is done."""
        if self._in_parts:
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
    """Median time of every contender as "total", and how it divides into parts.

    Args:
        steps: each runs one training step and calls `lap` behind each part of it.
        rounds: each contender runs so often in each way, after one round to warm up ...
        seconds: ... but no new round begins when so much time has passed, once there are two.
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

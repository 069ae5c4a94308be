"""Settings of studies. Wrong values are refused all at once, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slimstart.errors import ConfigError
from slimstart.policies import ESTIMATORS

PLAIN = "_plain"
"""Suffix of the name of an estimator: without the preconditioner, alpha = 0."""


@dataclass(frozen=True)
class VarianceSettings:
    """Settings of `run_study.py variance`; variances are divided by that of the first estimator."""

    estimators: tuple[str, ...] = ("vr_pge", "pge", "pge_plain")
    batches: int = 16
    draws: int = 64  # masks on each batch
    seed: int = 0  # of masks and batches

    def __post_init__(self) -> None:
        problems = list(_too_small({"batches": (self.batches, 3), "seed": (self.seed, 0)}))
        for name in self.estimators:
            if name.removesuffix(PLAIN) not in ESTIMATORS:
                problems.append(
                    f"`estimators` has {name!r}; it may have {', '.join(ESTIMATORS)}, each also as NAME{PLAIN}"
                )
            elif self.draws < (fewest := ESTIMATORS[name.removesuffix(PLAIN)].num_masks):
                problems.append(f"`draws` is {self.draws}; {name} needs at least {fewest}")
        if len(set(self.estimators)) < max(1, len(self.estimators)):
            problems.append("`estimators` is empty or names one twice; give one, or several with commas between them")
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True)
class FlipSettings:
    """Settings of `run_study.py flip`."""

    every: int = 10  # epochs between two measurements
    batches: int = 8
    draws: int = 16  # masks on each batch
    channels: int = 64  # each is flipped in every mask; all channels if there are fewer

    def __post_init__(self) -> None:
        least = {"every": (self.every, 1), "draws": (self.draws, 2), "channels": (self.channels, 1)}
        problems = list(_too_small(least))
        if self.batches < 4 or self.batches % 2:
            problems.append(f"`batches` is {self.batches}; it must be even and at least 4: each half judges the other")
        if problems:
            raise ConfigError("; ".join(problems))


def _too_small(least: dict[str, tuple[int, int]]) -> Iterator[str]:
    for name, (value, low) in least.items():
        if value < low:
            yield f"`{name}` is {value}; it must be at least {low}"

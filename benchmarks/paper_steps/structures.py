"""The structures that `run_paper_steps.py` measures: s at the start or in the middle of a search, and its masks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstart.errors import CheckpointError, ConfigError
from slimstart.io import checkpoints, training_state
from slimstart.lab.run.recording import structure_of
from slimstart.lab.run.run_folder import Run
from slimstart.policies import Flops, Learner
from slimstart.training import SparseTraining

HALF = 0.5
MAX_UPDATES = 20_000
PRESSURE = 3.0  # of the budget on s, in standard deviations of the noise
NUM_DRAWS = 9


def decided(learner: Learner) -> float:
    """Share of s within 0.05 of 0 or 1."""
    return float(structure_of(learner.keep_probs.cpu(), None)["certain"])


def to_the_middle(learner: Learner, seed: int) -> None:
    """Bring a learner to the middle of a search, without a network.

    Its losses are noise, and lower for a mask with more units, so that s remains at its budget as in a real search. The
    middle is where half of all s are within 0.05 of 0 or 1 and half of the variance of the number of units is gone:
    under a small budget most s are near 0 from the start.

    Raises:
        ConfigError: the middle is not reached.
    """
    generator = torch.Generator().manual_seed(seed)
    at_start = _variance(learner.keep_probs)
    for _ in range(MAX_UPDATES):
        variance = _variance(learner.keep_probs)
        if decided(learner) >= HALF and variance <= HALF * at_start:
            return
        extra = learner.draw().cpu().double().sum(1) - float(learner.keep_probs.sum())
        noise = torch.randn(learner.num_masks, generator=generator, dtype=torch.float64)
        learner.update(noise - PRESSURE * extra / variance**0.5)
    raise ConfigError(
        f"after {MAX_UPDATES:,} updates with noise only {decided(learner):.0%} of all s are within 0.05 of 0 or 1; "
        "take the structure `middle` from a run with --keep-probs"
    )


def _variance(s: Tensor) -> float:
    return float((s * (1 - s)).sum())


def saved_policy(path: Path, digest: str) -> Mapping[str, Any]:
    """The learner's state in a run's folder, or in a checkpoint of a run or of SparseTraining.

    Args:
        digest: that of the graph that the state must belong to.
    """
    found: Any = Run(path).latest() if path.is_dir() else checkpoints.read(path)
    if found is None:
        raise ConfigError(f"`keep_probs` is {str(path)!r}, which holds no checkpoint; give a run's folder that does")
    for level in ("method", "sparse"):  # where a run keeps it
        found = found.get(level, found)
    if found.get("format") != training_state.FORMAT:
        raise CheckpointError(f"`keep_probs` is {str(path)!r}, which holds no search; give the checkpoint of one")
    if found.get("structure") != digest:
        raise CheckpointError(
            f"`keep_probs` is {str(path)!r}, a search on another network or coupling; give --model, --classes and "
            "--coupling as they were there"
        )
    state: Mapping[str, Any] = found["policy"]
    return state


def typical_mask(sparse: SparseTraining) -> Tensor:
    """The draw with the median FLOPs of several: they differ by some percent."""
    cost = Flops(1.0).bind(sparse.graph.costs).cost
    masks = [_drawn(sparse).mask.cpu() for _ in range(NUM_DRAWS)]
    return sorted(masks, key=cost)[NUM_DRAWS // 2]


def executed_flops(sparse: SparseTraining) -> float:
    """FLOPs of one example as executed, zeros of padding included; mean over some draws."""
    return statistics.fmean(_drawn(sparse).executed_flops for _ in range(NUM_DRAWS))


def _drawn(sparse: SparseTraining) -> SparseTraining:
    sparse.resample()
    return sparse

"""The structures that `run_paper_steps.py` measures: s in the middle of a search, and its masks."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from slimstart.lab.run.recording import structure_of
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
        RuntimeError: the middle is not reached.
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
    raise RuntimeError(f"after {MAX_UPDATES:,} updates only {decided(learner):.0%} of all s are within 0.05 of 0 or 1")


def _variance(s: Tensor) -> float:
    return float((s * (1 - s)).sum())


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

r"""Gates that are drawn: s are keep-probabilities, projected on the budget as in our search.

With u uniform in (0, 1) and :math:`\ell(u) = \ln u - \ln(1 - u)`:

- `BernoulliGates` (straight-through, Bengio 2013): :math:`g = 1[u < s]`, and :math:`dg/ds := 1`, also where g = 0;
- `GumbelGates` (ProbMask, Zhou 2021): :math:`g = \sigma((\ell(s) + \ell(u)) / \tau)`, which becomes a Bernoulli draw as
  the temperature falls;
- `HardConcreteGates` (L0, Louizos 2018): :math:`g = \mathrm{clip}(\gamma + (\zeta - \gamma) v, 0, 1)` with
  :math:`v = \sigma((\ln\alpha + \ell(u)) / b)`. There :math:`P(g > 0) = \sigma(\ln\alpha - b \ln(-\gamma / \zeta))`, so
  with :math:`\ln\alpha = \ell(s) + b \ln(-\gamma / \zeta)` s is the probability that the gate is not zero (from 5 % to
  99.8 %, see below).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph
from slimstart.lab.methods.gates import AdamGates, straight_through
from slimstart.policies import uniform_start
from slimstart.policies.projection import Multisection

# ProbMask's release: from 1 down to 0.03, in a straight line.
START_TEMPERATURE, END_TEMPERATURE = 1.0, 0.03
# Louizos et al. 2018, section 4: the temperature b, and the stretch (gamma, zeta).
HARD_TEMPERATURE, STRETCH = 2 / 3, (-0.1, 1.1)
# The authors' release keeps |ln alpha| below this, so that no gate is shut for good: one in 21 is open where s = 0.
MOST_LOG_ALPHA = math.log(100)
# Ours (ProbMask's release adds 1e-20 within its logarithms): the margin of s at 0 and at 1 for `GumbelGates`.
MARGIN = 1e-6
# From the logit of s to ln alpha, and what its bounds are for s.
SHIFT = HARD_TEMPERATURE * math.log(-STRETCH[0] / STRETCH[1])
HARD_MARGINS = tuple(1 / (1 + math.exp(SHIFT - end)) for end in (-MOST_LOG_ALPHA, MOST_LOG_ALPHA))
# Points at which the mean of a hard concrete gate is taken.
QUANTILES = 128


class SampledGates(AdamGates):
    """Keep-probabilities, from the uniform s that meets the budget, projected on it after every step."""

    default_lr = 12e-3  # the paper's, for its own s: that of our search

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._projection = Multisection(self.budget).to(self.s.device)

    def start(self, model: nn.Module, graph: ChannelGraph) -> Tensor:
        return uniform_start(self.budget)

    @property
    def keep_probs(self) -> Tensor:
        return self.s.to("cpu", copy=True)

    def follow(self, z: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        return [(self.s, self._projection(z, self.s))]


class BernoulliGates(SampledGates):
    """0 or 1, with the gradient of s itself; a group that comes out empty keeps its first unit."""

    def gates(self, s: Tensor) -> Tensor:
        mask = self._table.at_least_one(torch.rand_like(s) < s.detach())
        return straight_through(mask.to(s.dtype), s)


class GumbelGates(SampledGates):
    """Between 0 and 1, ever nearer to one of them."""

    default_lr = 6e-3  # ProbMask's release

    temperature: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("temperature", self.s.new_tensor(START_TEMPERATURE))

    def begin_step(self, progress: float) -> None:
        self.temperature.fill_(START_TEMPERATURE + (END_TEMPERATURE - START_TEMPERATURE) * progress)

    def gates(self, s: Tensor) -> Tensor:
        return torch.sigmoid((_logit(s, MARGIN, 1 - MARGIN) + torch.logit(torch.rand_like(s))) / self.temperature)


class HardConcreteGates(SampledGates):
    """Between 0 and 1, and often at one of them, where s gets no gradient from this draw."""

    def gates(self, s: Tensor) -> Tensor:
        return hard_concrete(s, torch.rand_like(s))

    def values(self) -> Tensor:
        """The mean of a gate that is not zero."""
        # It is not zero where u > 1 - s. The paper's rule for a trained network, the gate at the median, is zero for
        # all s below 0.31, where a budget may well leave units that are kept.
        s = self.s.clamp(*HARD_MARGINS)
        parts = (torch.arange(QUANTILES, dtype=s.dtype, device=s.device) + 0.5) / QUANTILES
        return hard_concrete(s, 1 - s * parts[:, None]).mean(0).float()


def hard_concrete(s: Tensor, u: Tensor) -> Tensor:
    """The gate of a number u in (0, 1), which rises with u."""
    low, high = STRETCH
    log_alpha = _logit(s, *HARD_MARGINS) + SHIFT
    return (low + (high - low) * torch.sigmoid((log_alpha + torch.logit(u)) / HARD_TEMPERATURE)).clamp(0, 1)


def _logit(s: Tensor, least: float, most: float) -> Tensor:
    """The logit, taken no further out than this, with the gradient that it has there: a unit may come back."""
    return torch.logit(straight_through(s.detach().clamp(least, most), s))

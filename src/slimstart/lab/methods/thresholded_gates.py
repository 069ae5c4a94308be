r"""Gates by threshold: a unit is kept where its score is above a threshold t that the budget sets.

t is the score of the best unit that the budget leaves out, so it changes with the scores. In a group without a unit
above it, it is lowered to the second best score, so that the best unit is kept.

- `SigmoidGates` (AutoPrune, Xiao 2019): the scores are s; :math:`g = 1[s > t]`, and its gradient is that of
  :math:`\sigma(s - t)`.
- `SoftThresholdGates` (STR, Kusupati 2020, for whole filters): each group learns how large its filters must be. With
  :math:`a_c = \ln \|w_c\| - s_{k(c)}`, the norm of the filter against the threshold :math:`e^{s_k}` of its group,
  :math:`g_c = \max(0, 1 - e^{t - a_c})`. That is the soft threshold :math:`w_c \max(0, 1 - \theta_k / \|w_c\|)` with
  :math:`\theta_k = e^{s_k + t}`, but after the normalisation. Weights get its gradient too. In STR it is the decay of
  thresholds that sets how sparse the network becomes; here t does, by a common factor on all of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.costs import CostTable
from slimstart.devices import Movable, device_of
from slimstart.graph import ChannelGraph
from slimstart.lab.methods.gates import AdamGates, straight_through
from slimstart.lab.methods.pruning import filter_weights, members
from slimstart.policies import BoundBudget

# Ours: how far the first scores of `SigmoidGates` are apart within a group. Small against what they learn: a few steps.
SPREAD = 0.05
# Ours: the square of the norm below which a filter counts as zero.
LEAST_SQUARE = 1e-24


class Cutoff(Movable):
    """The units that a budget keeps, by their scores, in a fixed number of operations and without a synchronisation.

    The units by falling score, the best of every group before all others: of this list the longest beginning that
    three rounds of trying equally many lengths find within the budget (the longest of all where the cost only rises).

    Args:
        budget: bound to the table; both on the CPU.
    """

    def __init__(self, budget: BoundBudget, table: CostTable) -> None:
        self._budget, self._limit, self._table = budget, budget.limit, table
        self._group = torch.unique(table.unit_group.cpu(), return_inverse=True)[1]
        sizes = torch.bincount(self._group)
        self._first = torch.cumsum(sizes, 0) - sizes  # of every group, where units are sorted by groups
        self._second = torch.where(sizes > 1, self._first + 1, budget.num_units)
        self._num_lengths = math.ceil((budget.num_units + 1) ** (1 / 3))
        self._lengths = torch.arange(self._num_lengths)

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The mask (U,) of what stays, and the threshold (U,) of every unit, by its group."""
        falling = torch.argsort(scores, descending=True, stable=True)
        by_group = falling[torch.argsort(self._group[falling], stable=True)]
        leaders = scores.index_fill(0, by_group[self._first], math.inf)
        order = torch.argsort(leaders, descending=True, stable=True)
        rank = torch.argsort(order)
        length = self._lengths[:1]
        for power in (2, 1, 0):
            tried = length + self._lengths * self._num_lengths**power
            masks = self._table.at_least_one(rank < tried[:, None])
            fits = self._budget.expected(masks) <= self._limit
            length = tried[fits[1:].long().cumprod(0).sum(0, keepdim=True)]  # the first fits, as it did before
        nothing = scores.new_full((1,), torch.finfo(scores.dtype).min)  # finite: a checkpoint holds it
        common = torch.cat([leaders[order], nothing])[length.clamp(max=rank.numel())]
        second = torch.cat([scores[by_group], nothing])[self._second]
        return self._table.at_least_one(rank < length), torch.minimum(common, second)[self._group]


class ThresholdedGates(AdamGates):
    """Scores, and the threshold that the budget sets after every step."""

    default_lr = 12e-3  # as for keep-probabilities; neither paper has a budget that would tell

    mask: Tensor
    threshold: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cutoff = Cutoff(self.budget, self._table).to(self.s.device)
        with torch.no_grad():
            mask, threshold = self._cutoff(self.scores(self.s))
        self.register_buffer("mask", mask)
        self.register_buffer("threshold", threshold)

    @abstractmethod
    def scores(self, s: Tensor) -> Tensor:
        """(U,) float64, with a gradient for s."""

    @property
    def keep_probs(self) -> Tensor:
        """0 or 1."""
        return self.mask.to("cpu", torch.float64)

    def follow(self, z: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        return [(self.s, z), *zip((self.mask, self.threshold), self._cutoff(self.scores(z)), strict=True)]


class SigmoidGates(ThresholdedGates):
    """0 or 1, with the gradient of a sigmoid. It starts as the narrow network: the first units of every group."""

    def start(self, model: nn.Module, graph: ChannelGraph) -> Tensor:
        return torch.cat([torch.linspace(SPREAD, 0, len(group.units), dtype=torch.float64) for group in graph.groups])

    def scores(self, s: Tensor) -> Tensor:
        return s

    def gates(self, s: Tensor) -> Tensor:
        return straight_through(self.mask.to(s.dtype), torch.sigmoid(s - self.threshold))


class SoftThresholdGates(ThresholdedGates):
    """Filters' norms against thresholds; every group starts with the geometric mean of its norms for a threshold.

    The gates keep reading the model's weights.
    """

    @torch.no_grad()
    def start(self, model: nn.Module, graph: ChannelGraph) -> Tensor:
        self._log_norms, self._group = LogNorms(model, graph), graph.costs.unit_group.to(device_of(model))
        norms = self._log_norms()
        return torch.stack([norms[group.units.start : group.units.stop].mean() for group in graph.groups])

    def scores(self, s: Tensor) -> Tensor:
        return self._log_norms() - s[self._group]

    def gates(self, s: Tensor) -> Tensor:
        return (1 - torch.exp(self.threshold - self.scores(s))).relu()

    @torch.no_grad()
    def values(self) -> Tensor:
        return self.gates(self.s).float()


class LogNorms:
    """The logarithm of the norm of all filters that go with a unit, (U,) float64, with a gradient for the weights."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        found = filter_weights(model, graph)
        self._weights = list(found.values())
        units = torch.cat([graph.filters[layer] for layer in found])
        self._members = members(units, graph.num_units).to(device_of(model))

    def __call__(self) -> Tensor:
        rows = [weight.movedim(dim, 0).flatten(1) for weight, dim in self._weights]
        norms = [torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows]
        squares = torch.cat(norms).square()
        # A table in place of adding up by index: a GPU does that in another order every time.
        return (torch.cat([squares, squares.new_zeros(1)])[self._members].sum(1) + LEAST_SQUARE).log() / 2

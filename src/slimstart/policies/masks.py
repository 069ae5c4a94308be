r"""Masks from keep-probabilities: drawn, drawn with a cap on widths, the most probable one, and cut to a budget.

**Draws.** Every unit has its own keep-probability, :math:`m_u \sim \mathrm{Bernoulli}(s_u)` independently.

**Capped draws** keep little more units of a group than expected, so that narrow networks need little spare capacity.
The number of kept units of a group g has mean :math:`\mu_g = \sum s_u` and variance :math:`\sigma_g^2 = \sum s_u
(1 - s_u)`. A group that comes out with more than :math:`\lfloor \mu_g + 1.5 \sigma_g \rfloor` units is drawn again:
its units have the distribution :math:`p(m | s, \text{within the cap})`, and a little less than one draw in ten is
repeated.

The score of a capped draw is computed as if there were no cap. The exact one differs by :math:`\nabla \ln
P(\text{within})`, which is the same for all masks, and estimators that compare losses of several masks
(`Estimator.centred`) lose it: :math:`\mathbb{E}[(L_1 - L_2) c] = 0` for any constant c. So they estimate the gradient
of the capped objective without bias, except for groups that are above the cap `TRIES` times in a row (fewer than one in
ten thousand), whose last draw is taken. The expected cost is computed without the cap; draws cost a little less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.devices import Movable
from slimstart.policies.budgets import BoundBudget

SPREAD = 1.5  # standard deviations from the mean to the cap
TRIES = 4


def sample(keep_probs: Tensor, num_masks: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw independent masks :math:`m_k \sim p(m|s)`.

    The draw is raw: all units of a group may be dropped. That one of them is kept nevertheless is part of the loss and
    of the cost, not of the draw, so that `score` is the score of the draw.

    Args:
        keep_probs: s, of shape (U,).
        num_masks: how many to draw.
        generator: source of randomness, on the device of `keep_probs`; torch's global one by default.

    Returns:
        A bool tensor of shape (num_masks, U). Where s is 0 or 1, every mask agrees with it.
    """
    return uniform_numbers(num_masks, keep_probs.numel(), generator, keep_probs.device) < keep_probs


def uniform_numbers(
    num_masks: int, num_units: int, generator: torch.Generator | None, device: torch.device | str = "cpu"
) -> Tensor:
    """(num_masks, num_units) numbers in [0, 1): a unit is kept where its number is below its keep-probability."""
    # Double precision for any s: a float32 uniform is a multiple of 2^-24, and would never keep a unit below that.
    return torch.rand(num_masks, num_units, generator=generator, dtype=torch.float64, device=device)


class Cap(Movable):
    """The cap on every group.

    Args:
        unit_group: (U,) int64, the group of each unit.
    """

    def __init__(self, unit_group: Tensor) -> None:
        labels, self._group = torch.unique(unit_group.cpu(), return_inverse=True)
        self._zeros = torch.zeros(labels.numel(), dtype=torch.float64)

    def of(self, s: Tensor) -> Tensor:
        """(num_groups,) float64: the largest number of units of each group that a draw should keep."""
        mean = self._zeros.index_add(0, self._group, s)
        variance = self._zeros.index_add(0, self._group, s * (1 - s))
        return torch.floor(mean + SPREAD * variance.clamp(min=0).sqrt() + 1e-9)  # whole means may have rounded down

    def first_within(self, tries: Tensor, s: Tensor) -> Tensor:
        """(n, U): for each group the first of several independent draws that is within the cap, or else the last.

        No value is read on the host, so a CUDA graph can hold it.

        Args:
            tries: draws (TRIES, n, U).
            s: keep-probabilities (U,).
        """
        counts = torch.zeros(*tries.shape[:-1], self._zeros.numel(), dtype=torch.float64, device=s.device)
        within = counts.index_add_(-1, self._group, tries.double()) <= self.of(s)
        within[-1] = True
        chosen = within.byte().argmax(0)  # `argmax` returns the first of equal values
        return tries.gather(0, chosen.index_select(-1, self._group)[None]).squeeze(0)


def ranked(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Units (U,) sorted by group, then by falling score, then by number; and the rank of each within its group."""
    falling = torch.argsort(scores, descending=True, stable=True)
    order = falling[torch.argsort(group[falling], stable=True)]
    sizes = torch.bincount(group)
    return order, torch.arange(len(order)) - (torch.cumsum(sizes, 0) - sizes)[group[order]]


def places(scores: Tensor, group: Tensor) -> Tensor:
    """(U,) int64: the rank of each unit within its group, 0 for the highest score; equal scores in order of units."""
    order, place = ranked(scores, group)
    return torch.empty_like(order).scatter_(0, order, place)


def most_probable(s: Tensor, groups: Tensor) -> Tensor:
    """The most probable mask among those that keep the expected number of units of every group, and at least one.

    (The most probable of all masks is empty where s < 1/2, as it is at the start of most searches.)

    Args:
        s: keep-probabilities (U,), on the CPU.
        groups: each unit's group (U,), on the CPU.
    """
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    expected = torch.zeros(num_groups, dtype=torch.float64).index_add(0, groups, s)
    return places(s, groups) < expected.round().clamp(min=1)[groups]


def cut(mask: Tensor, s: Tensor, table: CostTable, budget: BoundBudget) -> Tensor:
    """A mask within the budget: as many of its least probable units as necessary are dropped.

    The at-least-one rule is applied.

    Args:
        mask: a draw (U,), on the CPU.
        s: keep-probabilities (U,), on the CPU.
    """
    mask = table.at_least_one(mask)
    if budget.cost(mask) <= budget.limit:
        return mask
    kept = mask.nonzero().squeeze(1)
    groups = table.unit_group.cpu()[kept]
    order, rank = ranked(s[kept], groups)
    relative = rank / torch.bincount(groups)[groups[order]]
    # The unit of a group with the highest s is dropped last (the at-least-one rule would keep a worse one instead).
    # Among equals, the last of a group is dropped first, where rank counts as a fraction of the group, so that equal s
    # give equally narrow layers.
    last_first = torch.argsort(relative, descending=True, stable=True)
    by_s = torch.argsort(s[kept[order[last_first]]], stable=True)
    removal = last_first[by_s]
    removal = removal[torch.argsort((rank[removal] == 0).to(torch.uint8), stable=True)]
    units = kept[order[removal]]
    too_few, enough = 0, units.numel()
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if budget.cost(_without(mask, units[:middle])) <= budget.limit:
            enough = middle
        else:
            too_few = middle
    return table.at_least_one(_without(mask, units[:enough]))


def _without(mask: Tensor, units: Tensor) -> Tensor:
    mask = mask.clone()
    mask[units] = False
    return mask

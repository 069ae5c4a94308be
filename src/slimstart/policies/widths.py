"""Widths that fill a budget: log-widths shifted by a common number, and their rounding to widths that are fast on GPUs.

All widths are rounded here: those of `EqualWorth`, its start, and those of uniform networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import BudgetError
from slimstart.policies.budgets import BoundBudget, Budget, Flops
from slimstart.policies.masks import places

ALIGN = 8  # default; GPUs are slow at widths that are not multiples of it
FILLED = 0.99  # fraction of the budget from which on widths are not increased unit by unit
SMALL = 8  # groups of fewer than SMALL * align units can have any width: multiples would be too far apart


class Fit:
    """Widths of the groups of one network that fill a budget.

    Args:
        budget: bound to `costs`.
        costs: cost table of the network.

    Attributes:
        group: (U,) int64, the group of each unit, from 0 to G - 1.
        sizes: (G,) int64, units of each group.
    """

    ROUNDS, POINTS = 5, 16

    def __init__(self, budget: BoundBudget, costs: CostTable) -> None:
        self._budget = budget
        self.group = torch.unique(costs.unit_group.cpu(), return_inverse=True)[1]
        self.sizes = torch.bincount(self.group)
        self._rank = places(torch.zeros(costs.num_units), self.group)
        # Shifting log-widths by this much gives one unit in every group, or all units.
        self._reach = 2 * math.log(max(2, int(self.sizes.max()))) + 1
        self._points = torch.linspace(0, 1, self.POINTS, dtype=torch.float64)

    def masks(self, widths: Tensor, rank: Tensor | None = None) -> Tensor:
        """(..., U): masks of the first units of every group, for widths (..., G); at least one unit.

        Args:
            rank: (U,), the rank of each unit within its group; by default their order.
        """
        rank = self._rank if rank is None else rank
        return rank < widths.round().clamp(min=1)[..., self.group]

    def mask(self, log_widths: Tensor, align: int = 1, rank: Tensor | None = None) -> Tensor:
        """(U,): the mask of rounded widths (`whole`) for log-widths (G,); `rank` as for `masks`."""

        def cost(widths: Tensor) -> float:
            return self._budget.cost(self.masks(widths, rank))

        return self.masks(whole(log_widths.exp(), self.sizes, align, cost, self._budget.limit), rank)

    def shares(self, profile: Tensor | None = None) -> Tensor:
        """(G,): log-widths of the largest fraction within the budget, equal for all groups or following a profile.

        Args:
            profile: (G,) positive numbers.
        """
        wanted = self.sizes.double().log()
        if profile is not None:  # the clamp is for profiles that no shift could bring within the sizes
            wanted = (wanted + (profile / profile.max()).log()).clamp(min=-self._reach / 2)
        return self(wanted)

    def __call__(self, log_widths: Tensor, frozen: Tensor | None = None) -> Tensor:
        """Log-widths (G,) shifted by a common number, so that their network fills the budget.

        Args:
            frozen: (G,) bool, groups that are not shifted; they must fit with the others at one unit.
        """
        shifted = 1.0 if frozen is None else (~frozen).double()
        low, span = torch.tensor(-self._reach, dtype=torch.float64), 2 * self._reach
        # Each round evaluates POINTS shifts at once and continues between the last that fits and the next. The first
        # point of a round always fits: at first because all widths are 1, then because it did in the round before.
        for _ in range(self.ROUNDS):
            tried = low + span * self._points
            widths = self._within(log_widths + tried[:, None] * shifted).exp()
            fits = (self._budget.expected(self.masks(widths)) <= self._budget.limit).long()
            low, span = tried[fits[1:].cumprod(0).sum()], span / (self.POINTS - 1)
        return self._within(log_widths + low * shifted)

    def _within(self, log_widths: Tensor) -> Tensor:
        return torch.minimum(log_widths.clamp(min=0), self.sizes.double().log())


def flops_share(budget: Budget, costs: CostTable) -> float:
    """The fraction of the FLOPs that a uniform network within a budget has; 0 if the budget is infeasible."""
    try:
        fit, flops = Fit(budget.bind(costs), costs), Flops(1.0).bind(costs)
    except BudgetError:
        return 0.0
    return flops.share(fit.masks(fit.shares().exp()))


def steps(sizes: Tensor, align: int) -> Tensor:
    """(G,): granularity of widths by size of the group: `align`, twice `align` for the largest, 1 for small ones."""
    if align == 1:
        return torch.ones_like(sizes)
    large = torch.where(sizes >= 32 * align, 2 * align, align)
    return torch.where(sizes >= SMALL * align, large, 1)


def whole(wanted: Tensor, sizes: Tensor, align: int, cost: Callable[[Tensor], float], limit: float) -> Tensor:
    """Whole widths near the wanted ones that fill the budget: multiples of `steps`, or of `align` for small widths.

    No width exceeds the wanted one by more than a step or a quarter, whichever is larger. If the budget is not filled
    then, as in networks of few groups, some widths are not multiples.

    Args:
        wanted: (G,) float64.
        sizes: (G,) int64, the largest possible widths.
        align: see `steps`.
        cost: the cost of widths (G,) int64.
        limit: limit of the cost; one unit per group costs less.
    """
    step = steps(sizes, align)
    step = torch.where((step > align) & (wanted < SMALL * align), align, step)
    if align > 1 and cost(torch.minimum(step, sizes)) > limit:
        return whole(wanted, sizes, 1, cost, limit)
    least = torch.minimum(step, sizes)
    most = torch.minimum(torch.maximum(wanted + step, 1.25 * wanted).floor().long(), sizes)
    widths = torch.minimum((wanted / step).round().long().clamp(min=1) * step, sizes)
    numbers = torch.arange(len(step))
    while cost(widths) > limit and bool((widths > least).any()):  # decrease the largest relative to the wanted one
        given = torch.where(widths > least, widths / wanted, 0.0)
        widths = torch.maximum(widths - step * (numbers == int(given.argmax())), least)

    def widen(group: int, by: Tensor) -> bool:
        """Increase a width, if the budget and its limit allow."""
        nonlocal widths
        wider = torch.minimum(widths + by * (numbers == group), sizes)
        if not int(widths[group]) < int(wider[group]) <= int(most[group]) or cost(wider) > limit:
            return False
        widths = wider
        return True

    def by_need() -> list[int]:
        """Groups in order of their width relative to the wanted one."""
        return list(torch.argsort(widths / wanted, stable=True).tolist())

    grows = True
    while grows:  # spend the rest of the budget
        grows = False
        for group in by_need():
            grows |= widen(group, step)
    needy = by_need()
    while needy and cost(widths) < FILLED * limit:  # then unit by unit, one group after the other
        if not widen(needy[0], torch.ones_like(step)):
            del needy[0]
    return widths

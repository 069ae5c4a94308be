"""Widths that fill a budget: log-widths moved by one number until they do, and whole widths that a GPU is fast with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.policies.budgets import BoundBudget
from slimstart.policies.ranking import places
from slimstart.policies.tables import Tables

FILLED = 0.99  # so much of a budget is enough
SMALL = 8  # groups of fewer units than so many times `align` have any width: multiples would be too far apart


class Fit(Tables):
    """Widths that fill a budget: in fixed work, and without asking for a value, so that a CUDA graph can hold it."""

    ROUNDS, POINTS = 5, 16

    def __init__(self, budget: BoundBudget, table: CostTable) -> None:
        self._budget = budget
        self.group = torch.unique(table.unit_group.cpu(), return_inverse=True)[1]
        self.sizes = torch.bincount(self.group)
        self._rank = places(torch.zeros(table.num_units), self.group)
        self._reach = 2 * math.log(max(2, int(self.sizes.max()))) + 1  # from one unit each to all of them
        self._points = torch.linspace(0, 1, self.POINTS, dtype=torch.float64)

    def masks(self, widths: Tensor, rank: Tensor | None = None) -> Tensor:
        """(..., U): the first units of every group, for widths (..., G); at least one.

        Args:
            rank: (U,), the place of each unit within its group; by default their order.
        """
        rank = self._rank if rank is None else rank
        return rank < widths.round().clamp(min=1)[..., self.group]

    def whole_mask(self, wanted: Tensor, align: int = 1, rank: Tensor | None = None) -> Tensor:
        """(U,): the mask of `whole` widths near those that are wanted, (G,); `rank` as for `masks`. Not for graphs."""

        def cost(widths: Tensor) -> float:
            return self._budget.cost(self.masks(widths, rank))

        return self.masks(whole(wanted, self.sizes, align, cost, self._budget.limit), rank)

    def __call__(self, log_widths: Tensor, held: Tensor | None = None) -> Tensor:
        """(n, G) -> (n, G): the same log-widths, moved by one number each, so that their networks fill the budget.

        Args:
            held: (G,) bool, groups that are not moved; they must fit with the others at one unit.
        """
        moved = 1.0 if held is None else (~held).double()
        low = torch.full_like(log_widths[:, :1], -self._reach)
        span = 2 * self._reach
        for _ in range(self.ROUNDS):  # the first point fits, as it did before: widths of at most one unit do
            tried = low + span * self._points
            widths = self._within(log_widths[:, None] + tried[..., None] * moved).exp()
            costs = self._budget.expected(self.masks(widths))
            fits = (costs <= self._budget.limit).long()
            last = fits[:, 1:].cumprod(1).sum(1, keepdim=True)
            low, span = tried.gather(1, last), span / (self.POINTS - 1)
        return self._within(log_widths + low * moved)

    def _within(self, log_widths: Tensor) -> Tensor:
        return torch.minimum(log_widths.clamp(min=0), self.sizes.double().log())


def steps(sizes: Tensor, align: int) -> Tensor:
    """In which steps groups of these sizes grow: of `align`, the largest of twice that, and small ones unit by unit."""
    if align == 1:
        return torch.ones_like(sizes)
    large = torch.where(sizes >= 32 * align, 2 * align, align)
    return torch.where(sizes >= SMALL * align, large, 1)


def whole(wanted: Tensor, sizes: Tensor, align: int, cost: Callable[[Tensor], float], limit: float) -> Tensor:
    """Widths near those that are wanted: whole numbers of `steps`, or of `align` where few, filling the budget.

    No group gets more than a step, or a quarter, beyond what is wanted. Where that leaves too much of the budget, as it
    does in networks of few groups, some have a width between two steps.

    Args:
        wanted: (G,) float64.
        sizes: (G,) int64, the most there can be.
        cost: of widths (G,) int64.
        limit: of the cost; that of one unit per group is below it.
    """
    step = steps(sizes, align)
    step = torch.where((step > align) & (wanted < SMALL * align), align, step)  # fine where few are wanted
    if align > 1 and cost(torch.minimum(step, sizes)) > limit:
        return whole(wanted, sizes, 1, cost, limit)
    least = torch.minimum(step, sizes)
    most = torch.minimum(torch.maximum(wanted + step, 1.25 * wanted).floor().long(), sizes)
    widths = torch.minimum((wanted / step).round().long().clamp(min=1) * step, sizes)
    numbers = torch.arange(len(step))
    while cost(widths) > limit:  # take away where most was given, for what was wanted
        given = torch.where(widths > least, widths / wanted, 0.0)
        widths = torch.maximum(widths - step * (numbers == int(given.argmax())), least)

    def widen(group: int, by: Tensor) -> bool:
        nonlocal widths
        wider = torch.minimum(widths + by * (numbers == group), sizes)
        if not int(widths[group]) < int(wider[group]) <= int(most[group]) or cost(wider) > limit:
            return False
        widths = wider
        return True

    def by_need() -> list[int]:
        return list(torch.argsort(widths / wanted, stable=True).tolist())

    grows = True
    while grows:  # give out what is left, first where most is missing
        grows = False
        for group in by_need():
            grows |= widen(group, step)
    needy = by_need()
    while needy and cost(widths) < FILLED * limit:  # unit by unit, one group after the other
        if not widen(needy[0], torch.ones_like(step)):
            del needy[0]
    return widths

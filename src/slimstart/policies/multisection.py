r"""The projection of `slimstart.policies.projection` in a fixed number of kernels, for a GPU.

It is the same point, :math:`s = \mathrm{clip}(z - v w, 0, 1)` with the least v >= 0 that makes it feasible, but no step
depends on a value, so a CUDA graph can hold it. The expected cost is evaluated at many v at once, in three rounds:

1. from 0 to where s is at most the feasible point `before` (and at what empties everything, should that not do: see the
   exception in `projection`);
2. and 3. within the last bracket, around the root of its secant: finely near to it, coarsely away from it.

Where the cost is smooth, each secant squares the error. On the networks that we know, the cost comes out between
(1 - 1e-7) limit and limit; at kinks (units that reach 0 or 1) it may be less, but it is never more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.policies.budgets import BoundBudget, BoundChannels
from slimstart.policies.tables import Tables

# The fractions of the limit that rounds aim at. They rise, lest rounding forbids what the round before has allowed, and
# stay below 1 by more than the rounding by which devices differ.
AIMS = (1 - 3e-11, 1 - 2e-11, 1 - 1e-11)
# Residuals count from a little above the aim, so that they are negative, and never 0, wherever that is met.
ABOVE = 1 + 1e-12
# The first bracket ends beyond where s is at most `before`, which need not meet the first aim.
BEYOND, LEAST = 1.25, 1e-6


class Multisection(Tables):
    """The projection on one budget, with units lowered alike, or by their filters for `Channels`.

    Args:
        budget: bound to a cost table, with at least one unit.
    """

    def __init__(self, budget: BoundBudget) -> None:
        self._budget, self._limit = budget, budget.limit
        self._w = budget.filters if isinstance(budget, BoundChannels) else torch.ones(budget.num_units).double()
        self._inverse = torch.where(self._w > 0, 1 / self._w, 0.0)
        aims = torch.tensor(AIMS, dtype=torch.float64) * budget.limit
        self._aims = aims.clamp(min=budget.minimum)  # what is left when all units are at 0
        self._zeros = self._aims * ABOVE

        # All points are in order of falling v, that is, of rising cost. A ladder climbs from 0 to the secant's root x
        # in [0, 1] and on to 1: as `slope * x + rise`, half of its steps even, half of them ever smaller towards x.
        gaps = torch.cat([torch.linspace(1, 1 / 16, 16), 4.0 ** -torch.arange(3, 18)]).double()
        self._slope = torch.cat([1 - gaps, torch.ones(1), 1 - gaps.flip(0)])
        self._rise = torch.cat([torch.zeros(gaps.numel() + 1), gaps.flip(0)])
        size = self._slope.numel()
        first = torch.linspace(BEYOND, 0, size - 1, dtype=torch.float64)
        self._first = torch.stack([torch.cat([torch.zeros(1), first]), torch.zeros(size)])
        self._first[1, 0] = 1
        # With n feasible points: the last of them, and the first that is not.
        n = torch.arange(size + 1)
        self._ends = torch.stack([(n - 1).clamp(min=0), n.clamp(max=size - 1)], 1)

    def __call__(self, z: Tensor, before: Tensor) -> Tensor:
        """The projection of z.

        Args:
            z: real numbers, of shape (U,), on this object's device.
            before: a feasible point that is near to z, of shape (U,).

        Returns:
            s, of shape (U,): clip(z, 0, 1), bit for bit, where that is feasible.
        """
        reaches = (torch.stack([z - before, z]) * self._inverse).amax(1)
        v = reaches.clamp(min=LEAST) @ self._first
        cost = self._budget.expected(self._along(z, v))
        is_inside = cost[-1] <= self._limit
        for index in (0, 1):
            ends = self._ends.index_select(0, self._num_feasible(cost, index)).view(2)
            (far, near), costs = torch.stack([v, cost]).index_select(1, ends)
            below, above = costs - self._zeros[index]
            root = (below / (below - above)).clamp(0, 1)
            v = torch.lerp(far, near, torch.addcmul(self._rise, self._slope, root))
            cost = self._budget.expected(self._along(z, v))
        last = self._ends.index_select(0, self._num_feasible(cost, 2)).view(2)[:1]
        return self._along(z, torch.where(is_inside, 0.0, v.index_select(0, last)))[0]

    def _along(self, z: Tensor, v: Tensor) -> Tensor:
        """The points of all v, one row each."""
        return torch.addcmul(z, v[:, None], self._w, value=-1).clamp_(0, 1)

    def _num_feasible(self, cost: Tensor, index: int) -> Tensor:
        # A binary search: also where costs are not in order, what it finds is feasible, and the next is not.
        return torch.searchsorted(cost, self._aims[index : index + 1], right=True)

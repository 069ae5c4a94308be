r"""Projection of keep-probabilities on a budget.

The feasible set is :math:`\mathcal{S} = \{ s \in [0,1]^U : c(s) \le K \}`, with c the expected cost. Every projection
here has the form

.. math:: s = \mathrm{clip}(z - v w, 0, 1), \qquad v \ge 0, \; w \ge 0,

with v the least that makes s feasible. It never raises an entry of clip(z), leaves a feasible point as it is, and a
smaller budget gives a smaller or equal s (where c rises with s: it may not where a group is all but empty and its first
unit, which the at-least-one rule keeps, costs more than its others).

`Channels`: :math:`c(s) = \sum_u f_u s_u` is linear and w = f makes this the Euclidean projection, exactly. `Params`
and `Flops`: c is a polynomial and :math:`\mathcal{S}` is not convex; its true nearest point empties whole layers. There
w is all ones: all units are lowered by the same amount.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slimstart.devices import Movable
from slimstart.policies.budgets import BoundBudget, BoundChannels

EPS = torch.finfo(torch.float64).eps
# A projected point costs between (1 - TOLERANCE) * limit and limit.
TOLERANCE = 1e-10

# The fractions of the limit that rounds aim at. They rise, lest rounding forbids what the round before has allowed, and
# stay below 1 by more than the rounding by which devices differ.
AIMS = (1 - 3e-11, 1 - 2e-11, 1 - 1e-11)
# Residuals count from a little above the aim, so that they are negative, and never 0, wherever that is met.
ABOVE = 1 + 1e-12
# The first bracket ends beyond where s is at most `before`, which need not meet the first aim.
BEYOND, LEAST = 1.25, 1e-6


@torch.no_grad()
def project(z: Tensor, budget: BoundBudget) -> Tensor:
    """The point of the feasible set that the module's docstring defines.

    Args:
        z: any real numbers, of shape (U,).
        budget: a budget bound to a cost table.

    Returns:
        s, float64, with `budget.expected(s) <= budget.limit`.
    """
    z = z.detach().cpu().double()
    if not bool(torch.isfinite(z).all()):
        raise ValueError(f"`z` has {int((~torch.isfinite(z)).sum())} entries that are NaN or infinite")
    inside = z.clamp(0, 1)
    if float(budget.expected(inside)) <= budget.limit:
        return inside
    return _euclidean(z, budget) if isinstance(budget, BoundChannels) else _along(z, budget)


@torch.no_grad()
def uniform_start(budget: BoundBudget) -> Tensor:
    """The largest s with all entries equal that meets the budget: where a search starts (the paper's s = rho)."""
    ones = torch.ones(budget.num_units, dtype=torch.float64)
    if not isinstance(budget, BoundChannels):
        return project(ones, budget)
    level = min(budget.limit / max(budget.dense, 1), 1.0)
    while float(budget.expected(level * ones)) > budget.limit:  # the sum rounds, too
        level = math.nextafter(level, 0.0)
    return level * ones


def _euclidean(z: Tensor, budget: BoundChannels) -> Tensor:
    r"""Solve :math:`\sum_u f_u \, \mathrm{clip}(z_u - v f_u, 0, 1) = K` for v.

    The left side is piecewise linear and falling. Newton's method within a bracket meets the right piece after a few
    steps, and then the root to the last bit.
    """
    f, rounding = budget.filters, 4 * EPS * budget.limit
    feasible = torch.where(f > 0, 0.0, z.clamp(0, 1))
    low, high, v = 0.0, float((z / f)[f > 0].max()), 0.0
    nudge = resolution = EPS * max(high, 1.0)  # finer differences of v move no s
    while high - low > resolution:
        y = z - v * f
        s = y.clamp(0, 1)
        excess = float(budget.expected(s)) - budget.limit
        if excess > 0:
            low = v
        else:
            high, feasible = v, s
            if excess >= -rounding:
                break
        slope = float((f * f)[(y > 0) & (y <= 1)].sum())
        step = v + excess / slope if slope > 0 else v
        if abs(step - v) < nudge:
            # The residual is the rounding of the sum. Steps that double cross it soon, and overshoot by as little.
            step, nudge = v + math.copysign(nudge, excess), 2 * nudge
        v = step if low < step < high else (low + high) / 2
    return feasible


def _along(z: Tensor, budget: BoundBudget) -> Tensor:
    """The feasible end of the path clip(z - v, 0, 1), whose start v = 0 is not feasible and whose far end is."""
    target = budget.limit * (1 - TOLERANCE / 2)

    def residual(v: float) -> float:
        return float(budget.expected((z - v).clamp(0, 1))) - target

    inside = z.clamp(0, 1)
    at_zero = residual(0.0)
    # Cost falls about with the square of the widths; so much for the first step.
    shrink = 1 - math.sqrt(target / (at_zero + target))
    guess = shrink * float(inside.sum()) / max(1, int((inside > 0).sum()))
    # A little less than the whole half-window, lest rounding in the residual passes the limit.
    v = _root(residual, at_zero, float(z.max()), guess, 0.49 * TOLERANCE * budget.limit)  # all are 0 at the largest z
    return (z - v).clamp(0, 1)


def _root(residual: Callable[[float], float], at_zero: float, high: float, guess: float, tolerance: float) -> float:
    """A v in (0, high] with -tolerance <= residual(v) <= tolerance, for a falling function with residual(0) > 0.

    Secant steps, within a bracket that is halved whenever three of them have not done so. Where the tolerance is finer
    than the resolution of v, the end of the bracket with the smaller residual.
    """
    low, v_old, r_old = 0.0, 0.0, at_zero
    v, size, steps = guess if 0 < guess < high else high / 2, high, 0
    resolution = EPS * max(high, 1.0)
    while high - low > resolution:
        r = residual(v)
        if abs(r) <= tolerance:
            return v
        low, high = (v, high) if r > 0 else (low, v)
        v_new = v - r * (v - v_old) / (r - r_old) if r != r_old else low
        v_old, r_old, steps = v, r, steps + 1
        if steps % 3 == 0:
            if high - low > size / 2:
                v_new = low
            size = high - low
        if low < v_new < high:
            v = v_new
        else:
            # v may range over many decades: halve those first.
            v = math.sqrt(low * high) if high > 4 * low > 0 else (low + high) / 2
    return high


class Multisection(Movable):
    r"""The same projection in a fixed number of kernels, for a GPU.

    It is the same point, :math:`s = \mathrm{clip}(z - v w, 0, 1)` with the least v >= 0 that makes it feasible, but no
    step depends on a value, so a CUDA graph can hold it. The expected cost is evaluated at many v at once, in three
    rounds:

    1. from 0 to where s is at most the feasible point `before` (and at what empties everything, should that not do: see
       the exception in this module's docstring);
    2. and 3. within the last bracket, around the root of its secant: finely near to it, coarsely away from it.

    Where the cost is smooth, each secant squares the error. On the networks that we know, the cost comes out between
    (1 - 1e-7) limit and limit; at kinks (units that reach 0 or 1) it may be less, but it is never more.

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

r"""Projection of keep-probabilities on a budget.

The feasible set is :math:`\mathcal{S} = \{ s \in [0,1]^U : c(s) \le K \}`, with c the expected cost. Every projection
here has the form

.. math:: s = \mathrm{clip}(z - v w, 0, 1), \qquad v \ge 0, \; w \ge 0,

with the smallest v for which s is feasible. It never increases an entry of clip(z), does not change a feasible point,
and a smaller budget gives a smaller or equal s. (The last holds where c increases with s. It may decrease where a group
is nearly empty and its first unit, which the at-least-one rule keeps, costs more than the others.)

`Channels`: :math:`c(s) = \sum_u f_u s_u` is linear and w = f makes this the Euclidean projection, exactly. `Params`
and `Flops`: c is a polynomial and :math:`\mathcal{S}` is not convex; its true nearest point empties whole layers. There
w is all ones: all units are lowered by the same amount. So it is for several budgets: then v is the smallest for which
all of them hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slimstart.devices import Movable
from slimstart.policies.budgets import BoundBudget, BoundChannels

EPS = torch.finfo(torch.float64).eps
TOLERANCE = 1e-10  # a projected point costs between (1 - TOLERANCE) * limit and limit

# For `Multisection`. The fraction of the limit that each of its three rounds aims at: increasing, so that a point that
# was feasible in one round is not infeasible by rounding in the next, and below 1 by more than rounding errors, by
# which devices differ.
AIMS = (1 - 3e-11, 1 - 2e-11, 1 - 1e-11)
# Residuals are relative to a little more than the aim, so that they are negative, and not 0, for points that meet it.
ABOVE = 1 + 1e-12
# The first bracket ends at BEYOND times the v for which s is at most `before`, because `before` may cost more than the
# first aim, which is below the limit; and at LEAST at least.
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
        raise ValueError(
            f"`z` has {int((~torch.isfinite(z)).sum())} entries that are NaN or infinite; all must be finite"
        )
    inside = z.clamp(0, 1)
    if float(budget.expected(inside)) <= budget.limit:
        return inside
    return _euclidean(z, budget) if isinstance(budget, BoundChannels) else _along(z, budget)


@torch.no_grad()
def uniform_start(budget: BoundBudget) -> Tensor:
    """The largest s within the budget with all entries equal, from which a search starts (the paper's s = rho)."""
    ones = torch.ones(budget.num_units, dtype=torch.float64)
    if not isinstance(budget, BoundChannels):
        return project(ones, budget)
    level = min(budget.limit / max(budget.dense, 1), 1.0)
    while float(budget.expected(level * ones)) > budget.limit:  # by rounding of the sum
        level = math.nextafter(level, 0.0)
    return level * ones


def _euclidean(z: Tensor, budget: BoundChannels) -> Tensor:
    r"""Solve :math:`\sum_u f_u \, \mathrm{clip}(z_u - v f_u, 0, 1) = K` for v.

    The left side is piecewise linear and decreasing. Newton's method within a bracket finds the right piece after a few
    steps, and then the root to the last bit.
    """
    f, rounding = budget.filters, 4 * EPS * budget.limit
    feasible = torch.where(f > 0, 0.0, z.clamp(0, 1))
    low, high, v = 0.0, float((z / f)[f > 0].max()), 0.0
    nudge = resolution = EPS * max(high, 1.0)  # smaller differences of v do not change s
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
            # The residual is of the size of rounding errors, and Newton's step is too. Doubling the step soon crosses
            # the root, with an overshoot of the same size.
            step, nudge = v + math.copysign(nudge, excess), 2 * nudge
        v = step if low < step < high else (low + high) / 2
    return feasible


def _along(z: Tensor, budget: BoundBudget) -> Tensor:
    """The first feasible point of the path clip(z - v, 0, 1), v > 0; v = 0 is not feasible, and the end of it is."""
    target = budget.limit * (1 - TOLERANCE / 2)

    def residual(v: float) -> float:
        return float(budget.expected((z - v).clamp(0, 1))) - target

    inside = z.clamp(0, 1)
    at_zero = residual(0.0)
    # Cost is about quadratic in the widths, which gives the first guess.
    shrink = 1 - math.sqrt(target / (at_zero + target))
    guess = shrink * float(inside.sum()) / max(1, int((inside > 0).sum()))
    # The window of costs is TOLERANCE wide, and the target is its middle. A little less than half of the width, so that
    # rounding in the residual does not exceed the limit.
    v = _root(residual, at_zero, float(z.max()), guess, 0.49 * TOLERANCE * budget.limit)  # all are 0 at the largest z
    return (z - v).clamp(0, 1)


def _root(residual: Callable[[float], float], at_zero: float, high: float, guess: float, tolerance: float) -> float:
    """A v in (0, high] with -tolerance <= residual(v) <= tolerance, for a decreasing function with residual(0) > 0.

    Secant steps within a bracket, which is halved whenever three of them have not halved it. If the tolerance is finer
    than the resolution of v, the feasible end of the bracket.
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
            # v may range over many orders of magnitude: bisect those first.
            v = math.sqrt(low * high) if high > 4 * low > 0 else (low + high) / 2
    return high


class Multisection(Movable):
    r"""The same projection in a fixed number of kernels, for a GPU.

    It is the same point, :math:`s = \mathrm{clip}(z - v w, 0, 1)` with the least v >= 0 that makes it feasible, but no
    step depends on a value, so a CUDA graph can hold it. The expected cost is evaluated at many v at once, in three
    rounds:

    1. from 0 to where s is at most the feasible point `before` (and at the v that drops everything, in case that is not
       feasible: see the exception in this module's docstring);
    2. and 3. within the last bracket, in steps that are small near the root of its secant and large elsewhere.

    Where the cost is smooth, each secant squares the error. For the networks of our tests, the cost is between (1 -
    1e-7) limit and limit; at kinks (units that reach 0 or 1) it may be less, but it is never more.

    Args:
        budget: bound to a cost table, with at least one unit.
    """

    def __init__(self, budget: BoundBudget) -> None:
        self._budget, self._limit = budget, budget.limit
        self._w = budget.filters if isinstance(budget, BoundChannels) else torch.ones(budget.num_units).double()
        self._inverse = torch.where(self._w > 0, 1 / self._w, 0.0)
        aims = torch.tensor(AIMS, dtype=torch.float64) * budget.limit
        self._aims = aims.clamp(min=budget.minimum)  # a limit equal to the minimum must be feasible at s = 0
        self._zeros = self._aims * ABOVE

        # All points are in order of decreasing v, that is, of increasing cost. For rounds 2 and 3, points in [0, 1] on
        # both sides of the secant's root x, as `slope * x + rise`: the gaps to x are evenly spaced, then decrease
        # geometrically towards x.
        gaps = torch.cat([torch.linspace(1, 1 / 16, 16), 4.0 ** -torch.arange(3, 18)]).double()
        self._slope = torch.cat([1 - gaps, torch.ones(1), 1 - gaps.flip(0)])
        self._rise = torch.cat([torch.zeros(gaps.numel() + 1), gaps.flip(0)])
        size = self._slope.numel()
        first = torch.linspace(BEYOND, 0, size - 1, dtype=torch.float64)
        self._first = torch.stack([torch.cat([torch.zeros(1), first]), torch.zeros(size)])
        self._first[1, 0] = 1
        # With n feasible points: the indices of the last of them, and of the first that is not.
        n = torch.arange(size + 1)
        self._ends = torch.stack([(n - 1).clamp(min=0), n.clamp(max=size - 1)], 1)

    def __call__(self, z: Tensor, before: Tensor) -> Tensor:
        """The projection of z.

        Args:
            z: real numbers, of shape (U,), on this object's device.
            before: a feasible point near z, of shape (U,).

        Returns:
            s, of shape (U,): exactly clip(z, 0, 1) if that is feasible.
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
        # A binary search. Even where costs are not in order, the point that it finds is feasible, and the next is not.
        return torch.searchsorted(cost, self._aims[index : index + 1], right=True)

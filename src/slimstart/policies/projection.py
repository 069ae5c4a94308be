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

from slimstart.policies.budgets import BoundBudget, BoundChannels

EPS = torch.finfo(torch.float64).eps
# A projected point costs between (1 - TOLERANCE) * limit and limit.
TOLERANCE = 1e-10


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

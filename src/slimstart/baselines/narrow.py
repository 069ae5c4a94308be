"""The hand-narrowed network: every width multiplied by one number, so that the budget is met; then plain training.

What anyone would do without a method. It keeps the first filters of every group, so it has the shape of a network that
is built narrow by hand, for any model that can be traced. In its protocol **front_heavy** the number falls from the
first group to the last by a factor of four: what someone would do who knows that late layers of such networks are wide
for nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph
from slimstart.structure import BoundBudget, Budget
from slimstart.structure.fitting import Fit, whole
from slimstart.subnet import compact_fresh

FRONT_HEAVY = (2.0, 0.5)  # times the common share, of the first group and of the last


def front_heavy(graph: ChannelGraph) -> Tensor:
    """(G,): factors that fall geometrically from the first group to the last."""
    first, last = FRONT_HEAVY
    return torch.logspace(math.log2(first), math.log2(last), len(graph.groups), base=2.0, dtype=torch.float64)


def uniform_mask(graph: ChannelGraph, budget: Budget, align: int = 1, profile: Tensor | None = None) -> Tensor:
    """The mask that keeps the largest equal share of every group that the budget allows.

    Args:
        profile: (G,), by which the shares of groups differ instead.
        align: large groups keep a multiple of so many units, because GPUs are slow at others (`whole`).

    Raises:
        BudgetError: one unit per group is too much already.
    """
    bound: BoundBudget = budget.bind(graph.costs)
    fit = Fit(bound, graph.costs)
    shares = fit.sizes if profile is None else fit.sizes * profile
    widths = fit(shares.double().log()[None])[0].exp()
    if align > 1:
        widths = whole(widths, fit.sizes, align, lambda tried: bound.cost(fit.masks(tried)), bound.limit)
    return fit.masks(widths)


def narrow(
    model: nn.Module, graph: ChannelGraph, budget: Budget, align: int = 1, profile: Tensor | None = None
) -> nn.Module:
    """A freshly initialised narrow network from a freshly initialised dense one; arguments as for `uniform_mask`."""
    return compact_fresh(model, graph.select(uniform_mask(graph, budget, align, profile)))

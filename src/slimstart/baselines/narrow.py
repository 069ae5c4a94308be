"""The hand-narrowed network: every width multiplied by one number, so that the budget is met; then plain training.

What anyone would do without a method. It keeps the first filters of every group, so it has the shape of a network that
is built narrow by hand, for any model that can be traced. In its protocol **front_heavy** the number falls from the
first group to the last by a factor of four: what someone would do who knows that late layers of such networks are wide
for nothing. In its protocol **start** it is the network that our search for widths starts from: equal shares too, but
rounded in another way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.baselines.shares import group_sizes, largest_within
from slimstart.graph import ChannelGraph, trace
from slimstart.narrow import compact_fresh
from slimstart.policies import BoundBudget, Budget, EqualWorth, Flops
from slimstart.policies.ranking import places
from slimstart.policies.widths import steps

FRONT_HEAVY = (2.0, 0.5)  # times the common share, of the first group and of the last


def front_heavy(graph: ChannelGraph) -> Tensor:
    """(G,): factors that fall geometrically from the first group to the last."""
    first, last = FRONT_HEAVY
    return torch.logspace(math.log2(first), math.log2(last), len(graph.groups), base=2.0, dtype=torch.float64)


def uniform_mask(graph: ChannelGraph, budget: Budget, align: int = 1, profile: Tensor | None = None) -> Tensor:
    """The mask that keeps the largest equal share of every group that the budget allows.

    Args:
        profile: (G,), by which the shares of groups differ instead.
        align: large groups keep a multiple of so many units (`steps`), because GPUs are slow at others; what rounding
            leaves of the budget is given out to one group after the other.

    Raises:
        BudgetError: one unit per group is too much already.
    """
    bound: BoundBudget = budget.bind(graph.costs)
    group = graph.costs.unit_group
    sizes = group_sizes(graph)
    wanted = sizes if profile is None else sizes * profile
    step = steps(sizes, align)
    rank = places(torch.zeros(graph.num_units), group)

    def mask(widths: Tensor) -> Tensor:
        return rank < torch.minimum(widths, sizes)[group]

    def of_share(share: float) -> Tensor:
        return mask((share * wanted / step).round().clamp(min=1) * step)

    if bound.cost(of_share(0.0)) > bound.limit:  # of one unit per group it is not: that would have been refused
        return uniform_mask(graph, budget, profile=profile)
    found = largest_within(bound, of_share)
    if align > 1:
        widths = torch.bincount(group[found])
        for narrowest in torch.argsort(widths / wanted, stable=True).tolist():
            wider = widths.index_add(0, torch.tensor([narrowest]), step[[narrowest]])
            if bound.cost(mask(wider)) <= bound.limit:
                widths = torch.minimum(wider, sizes)
        found = mask(widths)
    return found


def start_mask(graph: ChannelGraph, budget: Budget, align: int | None = None) -> Tensor:
    """The mask that a search for widths starts from: whether it learns anything is seen beside this one.

    Args:
        align: as for `EqualWorth`, with the same default.
    """
    policy = EqualWorth() if align is None else EqualWorth(align=align)
    return policy.start(graph.costs, budget).best_guess()


def narrow(
    model: nn.Module, graph: ChannelGraph, budget: Budget, align: int = 1, profile: Tensor | None = None
) -> nn.Module:
    """A freshly initialised narrow network from a freshly initialised dense one; arguments as for `uniform_mask`."""
    return compact_fresh(model, graph.select(uniform_mask(graph, budget, align, profile)))


def narrow_to(model: nn.Module, example_inputs: Any, flops: int, dense_flops: int, align: int = 1) -> nn.Module:
    """The hand-narrowed network, coupled by streams, of at most so many FLOPs.

    Raises:
        BudgetError: one unit per group is too much already.
    """
    # Half a FLOP more, so that rounding does not make it the next narrower network.
    budget = Flops(min(1.0, (flops + 0.5) / dense_flops))
    return narrow(model, trace(model, example_inputs, "stream"), budget, align)

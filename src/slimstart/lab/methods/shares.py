"""Masks by widths: the best units of every group, the same share of all groups, the largest share within a budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slimstart.graph import ChannelGraph
from slimstart.policies import BoundBudget
from slimstart.policies.masks import places


def keep_best(scores: Tensor, widths: Tensor, graph: ChannelGraph) -> Tensor:
    """The mask that keeps the best units of every group.

    Args:
        scores: (U,) of the units.
        widths: number of units to keep of each group; at least one is kept.
    """
    group = graph.costs.unit_group
    return places(scores, group) < widths.clamp(min=1)[group]


def keep_share(scores: Tensor, graph: ChannelGraph, budget: BoundBudget) -> Tensor:
    """The mask that keeps the best units of every group, the largest equal share of all that the budget allows."""
    sizes = group_sizes(graph)
    return largest_within(budget, lambda share: keep_best(scores, (share * sizes).round(), graph))


def group_sizes(graph: ChannelGraph) -> Tensor:
    """Units of every group."""
    return torch.tensor([len(group.units) for group in graph.groups])


def largest_share(budget: BoundBudget, mask: Callable[[float], Tensor]) -> float:
    """The largest number from 0 to 1 whose mask is within a budget, of a family of masks that grows with it.

    If even `mask(0)` is too large, it is 0 all the same: the caller knows what to do then.
    """
    if budget.cost(mask(1.0)) <= budget.limit:
        return 1.0
    fits, exceeds = 0.0, 1.0
    for _ in range(40):  # halving: far below the step between two widths
        middle = (fits + exceeds) / 2
        if budget.cost(mask(middle)) <= budget.limit:
            fits = middle
        else:
            exceeds = middle
    return fits


def largest_within(budget: BoundBudget, mask: Callable[[float], Tensor]) -> Tensor:
    """The mask of that number."""
    return mask(largest_share(budget, mask))

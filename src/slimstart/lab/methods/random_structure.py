"""A random structure at the budget, trained from scratch: the accuracy of a structure that nobody chose.

Every group gets a share of its own, uniform in (0, 1), and all shares are scaled by one number so that the budget is
met; the first filters are kept, as all are alike in a fresh network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph
from slimstart.lab.methods.shares import group_sizes, keep_best, largest_within
from slimstart.narrow import compact_fresh
from slimstart.policies import Budget


def random_mask(graph: ChannelGraph, budget: Budget, generator: torch.Generator) -> Tensor:
    """A mask with random widths.

    Raises:
        BudgetError: one unit per group is too much already.
    """
    sizes = group_sizes(graph)
    shares = torch.rand(len(graph.groups), generator=generator, dtype=torch.float64).clamp(min=1e-3)

    def mask(scale: float) -> Tensor:  # at 1 every group is whole
        odds = scale / max(1 - scale, 1e-12)
        return keep_best(-torch.arange(graph.num_units), ((odds * shares).clamp(max=1) * sizes).round(), graph)

    return largest_within(budget.bind(graph.costs), mask)


def random_structure(model: nn.Module, graph: ChannelGraph, budget: Budget, generator: torch.Generator) -> nn.Module:
    """A freshly initialised narrow network with random widths, from a freshly initialised dense one."""
    return compact_fresh(model, graph.select(random_mask(graph, budget, generator)))

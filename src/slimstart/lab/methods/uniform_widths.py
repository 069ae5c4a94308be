"""The uniform network: one share of every width, so that the budget is met; then plain training.

The simplest alternative to a method. It keeps the first filters of every group, so it has the shape of a network that
was built with fewer channels, for any model that can be traced. It is also the network that the search of `EqualWorth`
starts from, width by width. In its protocol **front_heavy** the share falls from the first group to the last by a
factor of four: a profile by hand, for networks whose late layers are wider than necessary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, trace
from slimstart.narrow import compact_fresh
from slimstart.policies import Budget, Flops
from slimstart.policies.widths import ALIGN, Fit

FRONT_HEAVY = (2.0, 0.5)  # times the common share, of the first group and of the last


def front_heavy(graph: ChannelGraph) -> Tensor:
    """(G,): factors that fall geometrically from the first group to the last."""
    first, last = FRONT_HEAVY
    return torch.logspace(math.log2(first), math.log2(last), len(graph.groups), base=2.0, dtype=torch.float64)


def uniform_mask(graph: ChannelGraph, budget: Budget, align: int = ALIGN, profile: Tensor | None = None) -> Tensor:
    """The mask that keeps the largest share of every group that the budget allows.

    Args:
        align: widths of large groups are multiples of this (`slimstart.policies.widths`), because GPUs are slow at
            others; the rest of the budget is given to one group after the other.
        profile: (G,), factors on the shares of the groups; by default all shares are equal.

    Raises:
        BudgetError: one unit per group is too much already.
    """
    fit = Fit(budget.bind(graph.costs), graph.costs)
    return fit.mask(fit.shares(profile), align)


def uniform(
    model: nn.Module, graph: ChannelGraph, budget: Budget, align: int = ALIGN, profile: Tensor | None = None
) -> nn.Module:
    """A freshly initialised narrow network from a freshly initialised dense one; arguments as for `uniform_mask`."""
    return compact_fresh(model, graph.select(uniform_mask(graph, budget, align, profile)))


def uniform_of_flops(
    model: nn.Module, example_inputs: Any, flops: int, dense_flops: int, align: int = ALIGN
) -> nn.Module:
    """The uniform network, coupled by streams, of at most this many FLOPs.

    Raises:
        BudgetError: one unit per group is too much already.
    """
    # Half a FLOP more, so that rounding does not make it the next narrower network.
    budget = Flops(min(1.0, (flops + 0.5) / dense_flops))
    return uniform(model, trace(model, example_inputs, "stream"), budget, align)

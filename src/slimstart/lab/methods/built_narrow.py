"""Networks that are built at the budget and trained as they are: uniform, random and shallower ones.

- **uniform**: one share of every width. The simplest alternative to a method: it keeps the first filters of every
  group, so it has the shape of a network that was built with fewer channels, for any model that can be traced. It is
  also the network that the search of `EqualWorth` starts from, width by width. In its protocol **front_heavy** the
  share falls from the first group to the last by a factor of four: a profile by hand, for networks whose late layers
  are wider than necessary.
- **random**: the accuracy of a structure that nobody chose. Every group has a share of its own, uniform in (0, 1), and
  all shares are scaled by one number so that the budget is met.
- **shallow**: fewer layers, with uniform widths. At equal cost, fewer and wider layers are often better, and faster on
  a GPU. `run/choosing.py` chooses the best sibling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, trace
from slimstart.lab.methods.shares import group_sizes, keep_best, largest_within
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
    """The uniform network, coupled by streams, of at most this many FLOPs; errors as for `uniform_mask`."""
    # Half a FLOP more, so that rounding does not make it the next narrower network.
    budget = Flops(min(1.0, (flops + 0.5) / dense_flops))
    return uniform(model, trace(model, example_inputs, "stream"), budget, align)


def random_mask(graph: ChannelGraph, budget: Budget, generator: torch.Generator) -> Tensor:
    """A mask with random widths, of the first filters: in a fresh network all are alike.

    Raises:
        BudgetError: one unit per group is too much already.
    """
    sizes = group_sizes(graph)
    shares = torch.rand(len(graph.groups), generator=generator, dtype=torch.float64).clamp(min=1e-3)

    def mask(scale: float) -> Tensor:  # at 1 every group is whole
        odds = scale / max(1 - scale, 1e-12)
        return keep_best(-torch.arange(graph.num_units), ((odds * shares).clamp(max=1) * sizes).round(), graph)

    return largest_within(budget.bind(graph.costs), mask)


def wide_sibling(
    make: Callable[[float], nn.Module], graph: ChannelGraph, budget: Budget, example: Tensor
) -> tuple[nn.Module, ChannelGraph]:
    """A shallower sibling of the dense network that is wide enough for a budget.

    Args:
        make: called with a factor on the widths of the sibling.
        graph: channel graph of the dense network; the budget is a fraction of it.
        example: one image, as a batch.

    Returns:
        The sibling, and its graph, in whose costs `whole` is the dense network: budgets are fractions of that.
    """
    width = 1.0
    while True:
        sibling = make(width)
        own = trace(sibling, example, "stream")
        own = replace(own, costs=replace(own.costs, whole=graph.costs))
        bound = budget.bind(own.costs)
        most = bound.cost(torch.ones(own.num_units, dtype=torch.bool))
        if most >= bound.limit:
            return sibling, own
        # FLOPs and parameters grow with the square of the widths; channels grow with the widths.
        width *= max(1.05, math.sqrt(1.02 * bound.limit / most))

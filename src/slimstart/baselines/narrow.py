"""The hand-narrowed network: every width multiplied by one number, so that the budget is met; then plain training.

What anyone would do without a method. It keeps the first filters of every group, so it has the shape of a network that
is built narrow by hand, for any model that can be traced. In its protocol **front_heavy** the number falls from the
first group to the last by a factor of four: what someone would do who knows that late layers of such networks are wide
for nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, trace
from slimstart.structure import Budget, Flops
from slimstart.structure.fitting import Fit
from slimstart.subnet import compact_fresh

FRONT_HEAVY = (2.0, 0.5)  # times the common share, of the first group and of the last


def front_heavy(graph: ChannelGraph) -> Tensor:
    """(G,): factors that fall geometrically from the first group to the last."""
    first, last = FRONT_HEAVY
    return torch.logspace(math.log2(first), math.log2(last), len(graph.groups), base=2.0, dtype=torch.float64)


def uniform_mask(graph: ChannelGraph, budget: Budget, align: int = 1, profile: Tensor | None = None) -> Tensor:
    """The mask that keeps the largest equal share of every group that the budget allows.

    Args:
        align: large groups keep a multiple of so many units, because GPUs are slow at others, and what rounding leaves
            of the budget is given out (`whole`): the start of a search for widths.
        profile: (G,), by which the shares of groups differ instead.

    Raises:
        BudgetError: one unit per group is too much already.
    """
    fit = Fit(budget.bind(graph.costs), graph.costs)
    shares = fit.sizes if profile is None else fit.sizes * profile / profile.max()
    widths = fit(shares.double().log()[None])[0].exp()
    return fit.masks(widths) if align == 1 else fit.whole_mask(widths, align)


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

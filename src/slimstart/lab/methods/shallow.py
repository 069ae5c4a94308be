"""A shallower sibling at the budget of the dense network: fewer layers, uniform widths, then plain training.

The comparison to make after the uniform network. At equal cost, fewer and wider layers are often better, and
faster on a GPU. `run/choosing.py` chooses the best sibling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, trace
from slimstart.policies import Budget


def wide_sibling(
    make: Callable[[float], nn.Module], graph: ChannelGraph, budget: Budget, example: Tensor
) -> tuple[nn.Module, ChannelGraph]:
    """A sibling that is wide enough for a budget.

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

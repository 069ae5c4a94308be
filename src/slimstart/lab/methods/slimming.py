r"""Network slimming (Liu et al. 2017): batch norm scales under an L1 penalty, then one threshold for all layers.

While the network is dense, :math:`\lambda \sum |\gamma|` is added to the loss; its gradient is
:math:`\lambda\,\mathrm{sign}(\gamma)`, as in the original. Then the units of smallest :math:`|\gamma|` are
removed, in whichever layer, and the network is retrained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimstart.errors import TraceError
from slimstart.graph import ChannelGraph
from slimstart.lab.methods.pruning import Trained, batch_norm_rows, batch_norms
from slimstart.lab.methods.shares import keep_share
from slimstart.policies import cut


def choose(trained: Trained) -> Tensor:
    """The mask of the units to keep."""
    scores = scales(trained.model, trained.graph)
    if trained.protocol == "uniform":
        return keep_share(scores, trained.graph, trained.budget)
    everything = torch.ones(trained.graph.num_units, dtype=torch.bool)
    return cut(everything, scores, trained.graph.costs, trained.budget)


def penalty(model: nn.Module) -> Tensor:
    """The sum of the magnitudes of all batch norm scales."""
    return torch.stack([norm.weight.abs().sum() for norm in batch_norms(model).values()]).sum()


def scales(model: nn.Module, graph: ChannelGraph) -> Tensor:
    """(U,) float64: the largest batch norm scale of each unit, by magnitude.

    Raises:
        TraceError: a unit has none.
    """
    found = torch.full((graph.num_units,), -1.0, dtype=torch.float64)
    for norm, units in batch_norm_rows(model, graph):
        there = units >= 0
        found.scatter_reduce_(0, units[there], norm.weight.detach().abs().double().cpu()[there], "amax")
    if bool((found < 0).any()):
        group = graph.groups[int(graph.costs.unit_group[(found < 0).nonzero()[0, 0]])]
        raise TraceError(
            f"network slimming needs a batch norm after every layer that can shrink, and {group.name} has none; "
            "choose another method"
        )
    return found

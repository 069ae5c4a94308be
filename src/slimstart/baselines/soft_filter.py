"""Soft filter pruning (He et al. 2018, "SoftNet"): after every epoch zero the filters of smallest norm, and go on.

Zeroed filters keep receiving gradients and may return; what is zero at the end is cut out. One fraction of all layers,
dense both ways all the time. Only filters are zeroed, not the normalisation rows behind them: a row of zeros would
never let its filter come back. The *uniform* protocol under this method's name in the paper's CIFAR rows is no soft
training but one cut of a trained network, by the same norms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimstart.baselines.pruning import Trained, filter_norms, filter_rows, keep_share
from slimstart.graph import ChannelGraph
from slimstart.structure import BoundBudget


def choose(trained: Trained) -> Tensor:
    """The mask of the filters that stay."""
    return mask(trained.model, trained.graph, trained.budget)


def mask(model: nn.Module, graph: ChannelGraph, budget: BoundBudget) -> Tensor:
    """Of the filters that are not zeroed: those of largest norm, the same share of every group."""
    return keep_share(filter_norms(model, graph, p=2), graph, budget)


@torch.no_grad()
def zero_(model: nn.Module, graph: ChannelGraph, kept: Tensor) -> None:
    """Zero the filters of all other units, in place."""
    gone = torch.cat([~kept, kept.new_zeros(1)])  # the unit -1 is always there
    for layer, rows in filter_rows(model, graph):
        rows.mul_(~gone[graph.filters[layer]].view(-1, *[1] * (rows.dim() - 1)).to(rows.device))

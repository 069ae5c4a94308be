r"""Soft filter pruning (He et al. 2018, "SoftNet"): after every epoch, zero the filters of smallest norm.

Zeroed filters still receive gradients and may return; the filters that are zero at the end are removed. All layers keep
the same fraction, and forward and backward are dense throughout. Three protocols:

- *original*: the weights of filters are zeroed, as the authors do. After a filter of zeros, batch norm divides by
  :math:`\sqrt{\varepsilon}`, so its gradient is some hundred times larger than before and it comes back with a large
  norm: sets of zeroed filters change from epoch to epoch until the learning rate has fallen.
- *folded*, ours: a filter is the one that the network computes, with its batch norm folded in,
  :math:`\gamma w / \sigma`, and it is the norm's row, :math:`\gamma` and its shift, that is zeroed. The gradient stays
  what it was, filters return seldom, and the zeroed network is the cut one. For a ReLU to let the gradient through,
  "zero" is a millionth of what it was.
- *uniform*, as in the paper's CIFAR rows of this method: no soft training, but one cut of a trained network by the
  norms of its weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph
from slimstart.lab.methods.pruning import Trained, batch_norm_rows, filter_norms, filter_rows
from slimstart.lab.methods.shares import keep_share
from slimstart.policies import BoundBudget

ALMOST_ZERO = 1e-6


def choose(trained: Trained) -> Tensor:
    """The mask of the filters that stay."""
    return mask(trained.model, trained.graph, trained.budget, trained.protocol)


def mask(model: nn.Module, graph: ChannelGraph, budget: BoundBudget, protocol: str) -> Tensor:
    """Of the filters that are not zeroed: those of largest norm, the same share of every group."""
    norms = folded_norms(model, graph) if protocol == "folded" else filter_norms(model, graph, p=2)
    return keep_share(norms, graph, budget)


def folded_norms(model: nn.Module, graph: ChannelGraph) -> Tensor:
    """(U,) float64: the 2-norm of a unit's filters, times that of the scales by which batch norm multiplies them."""
    squares = torch.zeros(graph.num_units, dtype=torch.float64)
    for norm, units in batch_norm_rows(model, graph):
        variance = torch.ones_like(norm.weight) if norm.running_var is None else norm.running_var + norm.eps
        values = (norm.weight.detach().square() / variance).double().cpu()
        squares.index_add_(0, units[units >= 0], values[units >= 0])
    return filter_norms(model, graph, p=2) * torch.where(_has_norm(model, graph), squares.sqrt(), 1.0)


@torch.no_grad()
def zero_(model: nn.Module, graph: ChannelGraph, kept: Tensor, protocol: str) -> None:
    """Zero the filters of all other units, in place."""
    weights = kept
    if protocol == "folded":
        weights = kept | _has_norm(model, graph)
        for norm, units in batch_norm_rows(model, graph):
            for row in (norm.weight, norm.bias):
                row.mul_(_factors(kept, units, ALMOST_ZERO).to(row))
    for layer, rows in filter_rows(model, graph):
        factors = _factors(weights, graph.filters[layer], 0.0)
        rows.mul_(factors.view(-1, *[1] * (rows.dim() - 1)).to(rows))


def _factors(kept: Tensor, units: Tensor, zero: float) -> Tensor:
    """By which rows of these units are multiplied; the unit -1 is always there."""
    return torch.where(torch.cat([kept, kept.new_ones(1)])[units], 1.0, zero)


def _has_norm(model: nn.Module, graph: ChannelGraph) -> Tensor:
    """(U,) bool: whether a batch norm follows the filters of a unit."""
    found = torch.zeros(graph.num_units + 1, dtype=torch.bool)
    for _, units in batch_norm_rows(model, graph):
        found[units] = True
    return found[:-1]

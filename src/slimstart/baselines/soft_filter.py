r"""Soft filter pruning (He et al. 2018, "SoftNet"): after every epoch zero the filters of smallest norm, and go on.

Zeroed filters keep receiving gradients and may return; what is zero at the end is cut out. One fraction of all layers,
dense both ways all the time.

A filter here is the one that the network computes: with its batch norm folded in, :math:`\gamma w / \sigma`. To zero it
is to zero the norm's row, :math:`\gamma` and its shift. The authors zero w; but behind a w of zeros the norm divides by
:math:`\sqrt{\varepsilon}`, the gradient is some hundred times too large, and after an epoch those that were zeroed have
larger norms than all others (on the embedded data 23 against 1.1), so that it is the trained ones which go next. Zeroed
as a whole, a filter gets the gradient that it always had, and the zeroed network is the cut one. For a ReLU to let that
gradient through, "zero" is a millionth of what it was.

The *uniform* protocol under this method's name in the paper's CIFAR rows is no soft training but one cut of a trained
network, by the norms of w.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slimstart.baselines.pruning import Trained, filter_norms, filter_rows, keep_share
from slimstart.graph import ChannelGraph
from slimstart.structure import BoundBudget

ZERO = 1e-6


def choose(trained: Trained) -> Tensor:
    """The mask of the filters that stay."""
    if trained.protocol == "uniform":
        return keep_share(filter_norms(trained.model, trained.graph, p=2), trained.graph, trained.budget)
    return mask(trained.model, trained.graph, trained.budget)


def mask(model: nn.Module, graph: ChannelGraph, budget: BoundBudget) -> Tensor:
    """Of the filters that are not zeroed: those of largest norm, the same share of every group."""
    return keep_share(folded_norms(model, graph), graph, budget)


def folded_norms(model: nn.Module, graph: ChannelGraph) -> Tensor:
    """(U,) float64: the 2-norm of a unit's filters, with the norms of their batch norm's scales as a factor."""
    squares = torch.zeros(graph.num_units, dtype=torch.float64)
    for norm, units in _rows(model, graph):
        variance = torch.ones_like(norm.weight) if norm.running_var is None else norm.running_var + norm.eps
        values = (norm.weight.detach().square() / variance).double().cpu()
        squares.index_add_(0, units[units >= 0], values[units >= 0])
    return filter_norms(model, graph, p=2) * torch.where(_has_norm(model, graph), squares.sqrt(), 1.0)


@torch.no_grad()
def zero_(model: nn.Module, graph: ChannelGraph, kept: Tensor) -> None:
    """Zero the filters of all other units, in place."""
    for norm, units in _rows(model, graph):
        for row in (norm.weight, norm.bias):
            row.mul_(_factors(kept, units).to(row))
    for layer, rows in filter_rows(model, graph):
        factors = _factors(kept | _has_norm(model, graph), graph.filters[layer])
        rows.mul_(factors.view(-1, *[1] * (rows.dim() - 1)).to(rows))


def _factors(kept: Tensor, units: Tensor) -> Tensor:
    """By which rows of these units are multiplied; the unit -1 is always there."""
    return torch.where(torch.cat([kept, kept.new_ones(1)])[units], 1.0, ZERO)


def _rows(model: nn.Module, graph: ChannelGraph) -> list[tuple[_BatchNorm, Tensor]]:
    """Every batch norm with scales, and the unit of each of its rows (-1: always there)."""
    norms = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.affine}
    return [(norms[name], graph.units_along(graph.tensors[name][0].axis)) for name in norms if name in graph.tensors]


def _has_norm(model: nn.Module, graph: ChannelGraph) -> Tensor:
    """(U,) bool: whether a batch norm stands behind a unit's filters."""
    found = torch.zeros(graph.num_units + 1, dtype=torch.bool)
    for _, units in _rows(model, graph):
        found[units] = True
    return found[:-1]

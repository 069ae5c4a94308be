"""Common parts of methods that cut a trained network: their input, and scores of filters.

A method is a function `choose(trained) -> mask`, which returns a mask within the budget; the program does the rest. The
**original** protocol sets widths as the method's authors did. The **uniform** one, which the rows of the paper's CIFAR
tables used, keeps the same fraction of every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slimstart.graph import ChannelGraph
from slimstart.policies import BoundBudget

PROTOCOLS = ("original", "uniform")


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network that is to be cut.

    Attributes:
        model: the network; a method may change the weights of units that it keeps.
        graph: channel graph of the network, with coupling "stream".
        budget: budget of this cut.
        batches: training images, on the model's device.
        loss_fn: called as `loss_fn(model, *batch)`.
        protocol: one of `PROTOCOLS`.
        round, num_rounds: number of this cut, from 1, and of all cuts.
        generator: for random numbers; on the CPU.
    """

    model: nn.Module
    graph: ChannelGraph
    budget: BoundBudget
    batches: Sequence[tuple[Any, ...]]
    loss_fn: Callable[..., Tensor]
    protocol: str = "original"
    round: int = 1
    num_rounds: int = 1
    generator: torch.Generator = field(default_factory=torch.Generator)


Choose = Callable[[Trained], Tensor]
Rounds = Callable[[ChannelGraph, BoundBudget, int], list[float]]


def even_rounds(graph: ChannelGraph, budget: BoundBudget, num_rounds: int) -> list[float]:
    """Fractions of the dense cost that are left after each round: each round removes the same share."""
    return [(budget.limit / budget.dense) ** (number / num_rounds) for number in range(1, num_rounds + 1)]


def filter_norms(model: nn.Module, graph: ChannelGraph, p: float) -> Tensor:
    """(U,) float64: the p-norm of all filters of a unit together."""
    total = torch.zeros(graph.num_units, dtype=torch.float64)
    for layer, rows in filter_rows(model, graph):
        powers = rows.detach().double().abs().pow(p).flatten(1).sum(1).cpu()
        units = graph.filters[layer]
        total.index_add_(0, units[units >= 0], powers[units >= 0])
    return total.pow(1 / p)


def filter_rows(model: nn.Module, graph: ChannelGraph) -> Iterator[tuple[str, Tensor]]:
    """Name and weight of every layer whose filters can be removed; the weight is a view with one row per filter."""
    for layer, (weight, dim) in filter_weights(model, graph).items():
        yield layer, weight.movedim(dim, 0)


def filter_weights(model: nn.Module, graph: ChannelGraph) -> dict[str, tuple[nn.Parameter, int]]:
    """Weight, and dimension of the filters, by the name of each layer whose filters can be removed."""
    parameters, found = dict(model.named_parameters()), {}
    for layer, units in graph.filters.items():
        if bool((units >= 0).any()):
            name = layer if layer in parameters else f"{layer}.weight"  # a weight may be used without a module
            # Where a layer reads and writes the same units, the first entry is that of the filters it writes.
            dim = next(p.dim for p in graph.tensors[name] if torch.equal(graph.units_along(p.axis), units))
            found[layer] = parameters[name], dim
    return found


def members(units: Tensor, num_units: int) -> Tensor:
    """(num_units, n): where each unit is found in a list of units (-1: none), padded with -1."""
    place = torch.argsort(units, stable=True)[int((units < 0).sum()) :]
    sizes = torch.bincount(units[place], minlength=num_units)
    table = torch.full((num_units, int(sizes.max())), -1)
    table[units[place], torch.arange(place.numel()) - (torch.cumsum(sizes, 0) - sizes)[units[place]]] = place
    return table


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """All batch norms with scales, by the name of the weight."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.affine}


def batch_norm_rows(model: nn.Module, graph: ChannelGraph) -> list[tuple[_BatchNorm, Tensor]]:
    """Every batch norm with scales that can shrink, and the unit of each of its rows (-1: always there)."""
    norms = batch_norms(model)
    return [(norms[name], graph.units_along(graph.tensors[name][0].axis)) for name in norms if name in graph.tensors]

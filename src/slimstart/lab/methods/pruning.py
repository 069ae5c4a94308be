"""What methods that cut a trained network share: what they are given, and how filters are scored.

A method is a function `choose(trained) -> mask`, a mask within the budget; the program does the rest, and is the same
for all of them. The **original** protocol deals out widths as the method's authors did; the **uniform** one, behind the
rows of the paper's CIFAR tables, keeps one fraction of every layer.
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
        model: a method may change weights of what it keeps.
        graph: of it, coupled by streams.
        budget: of this cut.
        batches: of training images, on the model's device.
        loss_fn: called as `loss_fn(model, *batch)`.
        protocol: one of `PROTOCOLS`.
        round, num_rounds: which cut this is, from 1, and of how many.
        generator: for whatever is drawn; on the CPU.
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
    """Fractions of the dense cost that are left after each round: each round takes away the same share."""
    return [(budget.limit / budget.dense) ** (number / num_rounds) for number in range(1, num_rounds + 1)]


def filter_norms(model: nn.Module, graph: ChannelGraph, p: float) -> Tensor:
    """(U,) float64: the p-norm of all filters that go with a unit, together."""
    total = torch.zeros(graph.num_units, dtype=torch.float64)
    for layer, rows in filter_rows(model, graph):
        powers = rows.detach().double().abs().pow(p).flatten(1).sum(1).cpu()
        units = graph.filters[layer]
        total.index_add_(0, units[units >= 0], powers[units >= 0])
    return total.pow(1 / p)


def filter_rows(model: nn.Module, graph: ChannelGraph) -> Iterator[tuple[str, Tensor]]:
    """Of every layer whose filters can go: its name, and its weight with one row per filter, as a view."""
    for layer, (weight, dim) in filter_weights(model, graph).items():
        yield layer, weight.movedim(dim, 0)


def filter_weights(model: nn.Module, graph: ChannelGraph) -> dict[str, tuple[nn.Parameter, int]]:
    """By layer whose filters can go: its weight, and the dimension along which they lie."""
    parameters, found = dict(model.named_parameters()), {}
    for layer, units in graph.filters.items():
        if bool((units >= 0).any()):
            name = layer if layer in parameters else f"{layer}.weight"  # a weight may be used without a module
            # The first: where a layer reads the very units that it writes, a trace notes what it writes before.
            dim = next(p.dim for p in graph.tensors[name] if torch.equal(graph.units_along(p.axis), units))
            found[layer] = parameters[name], dim
    return found


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every batch norm with scales, by the name of its weight."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.affine}

"""What methods that cut a trained network share: what they are given, how filters are scored, how widths are dealt out.

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
from slimstart.structure import BoundBudget

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


def ranks(scores: Tensor, graph: ChannelGraph) -> Tensor:
    """(U,): each unit's place in its group, 0 for the highest score; among equals the first comes first."""
    place = torch.empty(graph.num_units, dtype=torch.int64)
    for group in graph.groups:
        units = slice(group.units.start, group.units.stop)
        order = torch.argsort(scores[units], descending=True, stable=True)
        place[units][order] = torch.arange(len(group.units))
    return place


def keep_best(scores: Tensor, widths: Tensor, graph: ChannelGraph) -> Tensor:
    """The mask that keeps the best units of every group.

    Args:
        scores: (U,) of the units.
        widths: how many stay, of each group; at least one does.
    """
    return ranks(scores, graph) < widths.clamp(min=1)[graph.costs.unit_group]


def keep_share(scores: Tensor, graph: ChannelGraph, budget: BoundBudget) -> Tensor:
    """The mask that keeps the best units of every group, the largest equal share of all that the budget allows."""
    sizes = group_sizes(graph)
    return largest_within(budget, lambda share: keep_best(scores, (share * sizes).round(), graph))


def group_sizes(graph: ChannelGraph) -> Tensor:
    """Units of every group."""
    return torch.tensor([len(group.units) for group in graph.groups])


def largest_share(budget: BoundBudget, mask: Callable[[float], Tensor]) -> float:
    """The largest number from 0 to 1 whose mask is within a budget, of a family of masks that grows with it.

    If even `mask(0)` is too large, it is 0 all the same: the caller knows what to do then.
    """
    if budget.cost(mask(1.0)) <= budget.limit:
        return 1.0
    fits, exceeds = 0.0, 1.0
    for _ in range(40):  # halving: far below the step between two widths
        middle = (fits + exceeds) / 2
        if budget.cost(mask(middle)) <= budget.limit:
            fits = middle
        else:
            exceeds = middle
    return fits


def largest_within(budget: BoundBudget, mask: Callable[[float], Tensor]) -> Tensor:
    """The mask of that number."""
    return mask(largest_share(budget, mask))

r"""ThiNet (Luo 2017): drop the channels without which the next layer's output changes least, then rescale the rest.

Group after group, in the order of the network, on the network as cut so far. With :math:`x_u` the contributions of unit
u to sampled outputs of a layer that reads it, greedily build the set T of units that go and solve for the scales of
those that stay (a group with a unit that no linear layer or convolution reads goes by filter norms):

.. math:: T = \arg\min_T \Bigl\| \sum_{u \in T} x_u \Bigr\|^2, \qquad
          w = \arg\min_w \Bigl\| \sum_u x_u - \sum_{u \notin T} w_u x_u \Bigr\|^2 .

Both need only the Gram matrix :math:`G_{uv} = \langle x_u, x_v \rangle`. Each sample is, as in the original, one random
position and one random filter: `NUM_SAMPLES` per batch and layer. The scales are multiplied into the readers' weights.
A unit with several readers is chosen by all of them together, each relative to the sum of its own
:math:`\|x_u\|^2`, and each reader has scales of its own. Where scales are not unique, those nearest to 1 are taken.

**Widths** are one share of all groups, as in the original; both protocols are the same. **In rounds**, the groups are
divided between them in network order, and round r cuts the r-th part of them, by the largest share that its budget
allows (where even one unit each is too much: all groups). `round_fractions` are the budgets for which that is the same
share in all rounds: so each layer is cut once, to its final width, and the network retrained before the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.graph import ChannelGraph, ChannelGroup
from slimstart.graph.readers import Reader
from slimstart.lab.methods.activations import Reading, observable, observe
from slimstart.lab.methods.pruning import Trained, filter_norms
from slimstart.lab.methods.shares import group_sizes, keep_best, keep_share, largest_within
from slimstart.narrow.compact import masked
from slimstart.policies import BoundBudget
from slimstart.policies.masks import cut

NUM_SAMPLES = 2560  # ten per image of a batch of 256
# Directions in which contributions are this much weaker than in the strongest are noise: of a Gram matrix, its square.
RESOLUTION = 1e-5
TINY = torch.finfo(torch.float64).tiny


def choose(trained: Trained) -> Tensor:
    """The units to keep; the weights of their readers are rescaled in place."""
    graph = trained.graph
    scores = torch.zeros(graph.num_units, dtype=torch.float64)
    widths, sizes = group_widths(trained), group_sizes(graph)
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    for index in (widths < sizes).nonzero().squeeze(1).tolist():
        group = graph.groups[index]
        units = slice(group.units.start, group.units.stop)
        grams = gram_matrices(trained, group, mask)
        if set(group.units) <= {unit for reader, _ in grams for unit in reader.units.tolist()}:
            relative = [gram / gram.trace().clamp(min=TINY) for _, gram in grams]
            scores[units] = removal_order(torch.stack(relative).sum(0))
        else:  # what a unit contributes is not known where no such layer reads it
            scores[units] = filter_norms(trained.model, graph, 2)[units]
        mask[units] = keep_best(scores, widths, graph)[units]
        for reader, gram in grams:
            _rescale_(trained, reader, group, scales(gram, mask[units]))
    return cut(mask, scores, graph.costs, trained.budget)


def group_widths(trained: Trained) -> Tensor:
    """Number of units that each group keeps in this round."""
    graph, budget, sizes = trained.graph, trained.budget, group_sizes(trained.graph)
    first, last = (sizes.numel() * turn // trained.num_rounds for turn in (trained.round - 1, trained.round))
    level = torch.zeros(graph.num_units)

    def with_share(share: float) -> Tensor:
        cut_now = (share * sizes[first:last]).round()
        return keep_best(level, torch.cat([sizes[:first], cut_now, sizes[last:]]), graph)

    mask = largest_within(budget, with_share)
    if budget.cost(mask) > budget.limit:
        mask = keep_share(level, graph, budget)
    return torch.zeros_like(sizes).index_add(0, graph.costs.unit_group, mask.long())


def round_fractions(graph: ChannelGraph, budget: BoundBudget, num_rounds: int) -> list[float]:
    """Fraction of the dense network's cost after each round, such that all groups end with one share.

    Args:
        graph: channel graph of the dense network.
        budget: budget of the finished network.
    """
    final = keep_share(torch.zeros(graph.num_units), graph, budget)
    group = graph.costs.unit_group
    bounds = [len(graph.groups) * turn // num_rounds for turn in range(1, num_rounds + 1)]
    # A little more: a cost that comes back from a fraction must not fall below itself.
    return [min(budget.cost(final | (group >= bound)) * (1 + 1e-12) / budget.dense, 1.0) for bound in bounds]


def gram_matrices(trained: Trained, group: ChannelGroup, mask: Tensor) -> list[tuple[Reader, Tensor]]:
    """For every reader of a group's units, the Gram matrix of their contributions: float64, on the CPU.

    Args:
        mask: the network as cut so far.
    """
    graph = trained.graph
    layers = [reader for reader in observable(graph, trained.model) if bool(_in_group(reader, group).any())]
    found: dict[str, Tensor] = {}

    def look(reader: Reader, reading: Reading) -> None:
        x = contributions(reading, group, trained.generator).double()
        gram = x.T @ x
        found[reader.weight] = found[reader.weight] + gram if reader.weight in found else gram

    observe(masked(trained.model, graph.select(mask)), layers, trained.batches, trained.loss_fn, look)
    return [(reader, found[reader.weight].cpu()) for reader in layers if reader.weight in found]


def contributions(reading: Reading, group: ChannelGroup, generator: torch.Generator) -> Tensor:
    """(NUM_SAMPLES, units of the group): x at random positions, of random filters."""
    device, num_filters = reading.weight.device, reading.weight.shape[0]
    positions, filters = (
        torch.randint(high, (NUM_SAMPLES,), generator=generator).to(device)
        for high in (reading.num_positions, num_filters)
    )
    channels = ((reading.units >= group.units.start) & (reading.units < group.units.stop)).nonzero().squeeze(1)
    owner = (reading.units[channels] - group.units.start).to(device)
    channels = channels.to(device)
    products = reading.patches(positions)[:, channels] * reading.weight[filters][:, channels]
    return products.new_zeros(NUM_SAMPLES, len(group.units)).index_add_(1, owner, products.sum(2))


def removal_order(gram: Tensor) -> Tensor:
    """(n,): when each unit goes, 0 for the first, if always that one goes which leaves the least error."""
    increase = gram.diagonal().clone()  # of the error, were this one to go next
    order = torch.empty_like(increase)
    for turn in range(increase.numel()):
        best = int(increase.argmin())
        order[best] = turn
        increase += 2 * gram[best]
        increase[best] = torch.inf
    return order


def scales(gram: Tensor, kept: Tensor) -> Tensor:
    """(n,): by what to multiply the contributions of units that are kept; 1 for the others."""
    inverse = torch.linalg.pinv(gram[kept][:, kept], rtol=RESOLUTION**2, hermitian=True)
    found = torch.ones(kept.numel(), dtype=torch.float64)
    found[kept] += inverse @ gram[kept][:, ~kept].sum(1)
    return found


@torch.no_grad()
def _rescale_(trained: Trained, reader: Reader, group: ChannelGroup, factors: Tensor) -> None:
    weight = trained.model.get_parameter(reader.weight)
    inside = _in_group(reader, group)
    along = torch.ones(reader.units.numel(), dtype=torch.float64)
    along[inside] = factors[reader.units[inside] - group.units.start]
    shape = [1] * weight.dim()
    shape[reader.dim] = -1
    weight.mul_(along.to(weight).view(shape))


def _in_group(reader: Reader, group: ChannelGroup) -> Tensor:
    return (reader.units >= group.units.start) & (reader.units < group.units.stop)

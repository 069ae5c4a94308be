"""L1-Pruning (Li et al. 2017): drop the filters whose weights have the smallest sum of magnitudes.

The authors set the widths by hand, from how much the loss of the trained network suffers when one layer alone is
pruned. Here the same curves set them: one tolerance for all layers, each keeps as few filters as raise the loss by no
more than that, and the tolerance is as small as the budget allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.baselines.pruning import Trained, filter_norms, group_sizes, keep_best, keep_share, largest_within
from slimstart.subnet import MaskedNetwork

FRACTIONS = (1.0, 0.8, 0.6, 0.4, 0.25, 0.1, 0.0)
"""Of a group, at which its curve is measured; in between it is taken as straight. 0: one unit is left."""

NUM_BATCHES = 4


def choose(trained: Trained) -> Tensor:
    """The mask of the filters that stay."""
    scores = filter_norms(trained.model, trained.graph, p=1)
    if trained.protocol == "uniform":
        return keep_share(scores, trained.graph, trained.budget)
    curves = sensitivity(trained, scores)
    most = float(curves.max())

    def with_share(share: float) -> Tensor:
        return keep_best(scores, widths_within(curves, (1 - share) * most, trained), trained.graph)

    return largest_within(trained.budget, with_share)


def sensitivity(trained: Trained, scores: Tensor) -> Tensor:
    """(groups, fractions): by how much the loss rises if this group alone keeps this fraction; never falling."""
    graph = trained.graph
    network = MaskedNetwork(trained.model, graph)
    sizes, everything = group_sizes(graph), torch.ones(graph.num_units, dtype=torch.bool)

    def loss(mask: Tensor) -> Tensor:
        network.set_(mask)
        losses = [trained.loss_fn(network.module, *batch) for batch in trained.batches[:NUM_BATCHES]]
        return torch.stack(losses).mean().double()

    whole = loss(everything)
    curves = []
    for number, group in enumerate(graph.groups):
        for fraction in FRACTIONS:
            widths = sizes.clone()
            widths[number] = round(fraction * len(group.units))
            curves.append(whole if fraction == 1 else loss(keep_best(scores, widths, graph)))
    rise = torch.stack(curves).cpu().view(len(graph.groups), len(FRACTIONS)) - whole.cpu()
    return torch.nan_to_num(rise, nan=float("inf"), posinf=1e6).clamp(min=0).cummax(dim=1).values


def widths_within(curves: Tensor, tolerance: float, trained: Trained) -> Tensor:
    """How many units each group needs, so that its own rise of the loss is at most the tolerance."""
    sizes = group_sizes(trained.graph)
    fractions = torch.tensor(FRACTIONS, dtype=torch.float64)
    last = ((curves <= tolerance).sum(1) - 1).clamp(max=len(FRACTIONS) - 2)  # the curves begin at zero
    row = torch.arange(len(curves))
    low, high = curves[row, last], curves[row, last + 1]
    beyond = ((tolerance - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return ((fractions[last] + beyond * (fractions[last + 1] - fractions[last])) * sizes).ceil()

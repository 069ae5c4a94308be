"""L1-Pruning (Li et al. 2017): drop the filters whose weights have the smallest sum of magnitudes.

The authors set the widths by hand, from the rise of the loss of the trained network when a single layer is
pruned. Here the same curves set them: each layer keeps the fewest filters that raise the loss by no more than a common
tolerance, which is as small as the budget allows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstart.lab.methods.pruning import Trained, filter_norms
from slimstart.lab.methods.shares import group_sizes, keep_best, keep_share, largest_within
from slimstart.narrow.compact import masked

FRACTIONS = (1.0, 0.8, 0.6, 0.4, 0.25, 0.1, 0.0)
"""Kept fractions of a group at which its curve is measured, linear in between. 0: one unit is kept."""

NUM_BATCHES = 4
HOPELESS = 1e6  # in place of a rise of the loss that is not finite
SLOPE = 1e-6  # of every curve, at least: layers whose loss does not rise shrink alike, and no further than they must


def choose(trained: Trained) -> Tensor:
    """The mask of the filters that stay."""
    scores = filter_norms(trained.model, trained.graph, p=1)
    if trained.protocol == "uniform":
        return keep_share(scores, trained.graph, trained.budget)
    curves = sensitivity(trained, scores)
    most, sizes = float(curves.max()), group_sizes(trained.graph)

    def with_share(share: float) -> Tensor:
        # The third power: most of the numbers from 0 to 1 are for small tolerances.
        return keep_best(scores, widths_within(curves, (1 - share) ** 3 * most, sizes), trained.graph)

    return largest_within(trained.budget, with_share)


def sensitivity(trained: Trained, scores: Tensor) -> Tensor:
    """(groups, fractions): the rise of the loss if only this group is pruned, to this fraction; made monotone."""
    graph = trained.graph

    def loss(mask: Tensor) -> Tensor:
        network = masked(trained.model, graph.select(mask))
        losses = [trained.loss_fn(network, *batch) for batch in trained.batches[:NUM_BATCHES]]
        return torch.stack(losses).mean().double()

    whole = loss(torch.ones(graph.num_units, dtype=torch.bool))
    sizes, curves = group_sizes(graph), []
    measured = measured_widths(sizes)
    for number, points in enumerate(measured):
        for width in points:
            widths = sizes.clone()
            widths[number] = width
            curves.append(whole if width == sizes[number] else loss(keep_best(scores, widths, graph)))
    rise = torch.stack(curves).cpu().view(len(graph.groups), len(FRACTIONS)) - whole.cpu()
    rise = torch.nan_to_num(rise, nan=HOPELESS).clamp(0, HOPELESS).cummax(dim=1).values
    return rise + SLOPE * (1 - measured / sizes[:, None])


def measured_widths(sizes: Tensor) -> Tensor:
    """(groups, fractions): how many units a group has where its curve is measured."""
    return (sizes[:, None] * torch.tensor(FRACTIONS, dtype=torch.float64)).round().clamp(min=1)


def widths_within(curves: Tensor, tolerance: float, sizes: Tensor) -> Tensor:
    """The number of units that each group needs for a rise of the loss of at most the tolerance.

    Args:
        curves: result of `sensitivity`.
        sizes: units of every group.
    """
    last = (curves <= tolerance).sum(1) - 1  # the curves begin at zero
    row, widths = torch.arange(len(curves)), measured_widths(sizes)
    # After the last point there are no units left to remove.
    low, high = curves[row, last], F.pad(curves, (0, 1), value=torch.inf)[row, last + 1]
    start, end = widths[row, last], F.pad(widths, (0, 1), value=1.0)[row, last + 1]
    return (start + (tolerance - low) / (high - low) * (end - start)).ceil()

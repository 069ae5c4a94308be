r"""Provable filter pruning (Liebenwein 2020): keep the channels that can matter most to any output of the next layers.

The **sensitivity** of an input channel is its largest share of a pre-activation, over all images, positions p and
filters i of the layers that read it,

.. math:: s_c = \max_{p, i} \frac{\langle w_{ic}, a_{pc} \rangle}{\sum_{c'} \langle w_{ic'}, a_{pc'} \rangle},

taken apart by the signs of weights and of activations, so that nothing cancels: a share is at most 1. (The authors'
release takes the largest share of a single tap; here the taps of a channel stay together, as they do when it goes.)
For a unit with several readers it is the largest one.

Draws with replacement, by probabilities :math:`p_c = s_c / S` with :math:`S = \sum_c s_c` over the group, keep all
pre-activations within a factor :math:`1 \pm \varepsilon`, but for a probability :math:`\delta`, if there are

.. math:: m(\varepsilon) = \Bigl\lceil \frac{K (6 + 2 \varepsilon)}{\varepsilon^2} \, S \,
          \log \frac{8 (n + 1) \kappa}{\delta} \Bigr\rceil

of them (the bound of arXiv 1911.07412 with the constants of the authors' release, torchprune: n positions per image,
:math:`\kappa` taps, :math:`\delta = 10^{-16}`, K = 18). They find :math:`\sum_c 1 - (1 - p_c)^m` different channels on
average. That is the number of channels that are kept: the best ones, as in the authors' deterministic variant. A common
:math:`\varepsilon` for all groups, the least that the budget allows, sets the widths; K only rescales it.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstart.graph import ChannelGraph
from slimstart.graph.readers import Reader
from slimstart.lab.methods.activations import Reading, observable, observe
from slimstart.lab.methods.pruning import Trained, filter_norms, members
from slimstart.lab.methods.shares import keep_best, keep_share, largest_within
from slimstart.policies.masks import cut

FAILURE = 1e-16
CONSTANT = 18.0
# Largest number of elements of the temporary tensors: 128 MiB each in single precision.
CHUNK = 1 << 25
# The range of errors that is searched: wider than any budget asks for.
LARGEST_ERROR, SMALLEST_ERROR = 1e30, 1e-30
TINY = torch.finfo(torch.float64).tiny


def choose(trained: Trained) -> Tensor:
    """The mask of the units to keep; the model is not changed."""
    graph, budget = trained.graph, trained.budget
    sensitivity, outcomes = sensitivities(trained)
    if trained.protocol == "uniform":
        mask = keep_share(sensitivity, graph, budget)
    else:
        span = math.log(SMALLEST_ERROR / LARGEST_ERROR)

        def with_share(share: float) -> Tensor:
            widths = widths_for(LARGEST_ERROR * math.exp(share * span), sensitivity, outcomes, graph)
            return keep_best(sensitivity, widths, graph)

        mask = largest_within(budget, with_share)
    return cut(mask, sensitivity, graph.costs, budget)


def sensitivities(trained: Trained) -> tuple[Tensor, Tensor]:
    """Sensitivities of all units, and the largest (n + 1) * kappa of their readers; both (U,), float64.

    A unit that no supported layer reads is judged by the norm of its filters, relative to the
    largest of its group.
    """
    graph = trained.graph
    model = copy.deepcopy(trained.model)
    share = torch.full((graph.num_units,), -1.0, dtype=torch.float64)
    outcomes = torch.full((graph.num_units,), 2.0, dtype=torch.float64)

    def look(reader: Reader, reading: Reading) -> None:
        units = reading.units[reading.units >= 0].unique()
        channels = members(reading.units, graph.num_units)[units]
        share[units] = torch.maximum(share[units], largest_shares(reading, channels).double().cpu())
        number = (reading.positions_per_image + 1) * reading.weight.shape[2]
        outcomes[units] = outcomes[units].clamp(min=number)

    observe(model, observable(graph, model), trained.batches, trained.loss_fn, look)
    unseen = share < 0
    if bool(unseen.any()):
        norms, group = filter_norms(model, graph, 2), graph.costs.unit_group
        largest = torch.zeros(len(graph.groups), dtype=torch.float64).scatter_reduce(0, group, norms, "amax")
        share[unseen] = (norms / largest[group].clamp(min=TINY))[unseen]
    return share, outcomes


def largest_shares(reading: Reading, channels: Tensor) -> Tensor:
    """(B,): the largest share of each unit in one call of a layer; `channels` (B, m) of each, padded with -1."""
    device = reading.weight.device
    channels = channels.to(device)
    signed = [reading.weight.clamp(min=0), reading.weight.neg().clamp(min=0)]
    kernels = [_by_unit(weight, channels).transpose(0, 1) for weight in signed]  # (B, F, taps of all its channels)
    num_units, num_filters, num_taps = kernels[0].shape
    best = torch.zeros(num_units, dtype=reading.weight.dtype, device=device)
    step = max(1, CHUNK // max(num_units * num_filters, num_units * num_taps, reading.weight[0].numel()))
    for start in range(0, reading.num_positions, step):
        stop = min(start + step, reading.num_positions)
        patches = reading.patches(torch.arange(start, stop, device=device))
        halves = [patches.clamp(min=0), patches.neg().clamp(min=0)] if bool((patches < 0).any()) else [patches]
        for half in halves:
            inputs = _by_unit(half, channels).permute(1, 2, 0)  # (B, taps, positions)
            for weight, kernel in zip(signed, kernels, strict=True):
                total = weight.flatten(1) @ half.flatten(1).T
                # Shares of a sum that is zero are zero.
                inverse = torch.where(total > torch.finfo(total.dtype).tiny, 1 / total, 0.0)
                best = torch.maximum(best, torch.bmm(kernel, inputs).mul_(inverse).amax((1, 2)))
    return best.clamp(max=1)


def _by_unit(rows: Tensor, channels: Tensor) -> Tensor:
    """(rows, channels, taps) -> (rows, B, m * taps), with zeros where a unit has fewer channels than another."""
    return F.pad(rows, (0, 0, 0, 1))[:, channels].flatten(2)


def widths_for(error: float, sensitivity: Tensor, outcomes: Tensor, graph: ChannelGraph) -> Tensor:
    """Number of units to keep of every group for this error: the expected number of different ones in m draws."""
    group, zeros = graph.costs.unit_group, torch.zeros(len(graph.groups), dtype=torch.float64)
    total = zeros.index_add(0, group, sensitivity)
    most = zeros.scatter_reduce(0, group, outcomes, "amax")
    draws = (CONSTANT * (6 + 2 * error) / error**2 * total * (8 * most / FAILURE).log()).ceil()
    probability = sensitivity / total.clamp(min=TINY)[group]
    found = -torch.expm1(draws[group] * torch.log1p(-probability))
    # The sum of numbers that are all but 1 may come out a little above their count.
    return (zeros.index_add(0, group, found) - 1e-9).ceil()

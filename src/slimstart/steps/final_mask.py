"""The choice of the final mask by its loss, and the user's batches for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from slimstart.distributed.process_group import num_examples
from slimstart.errors import NonFiniteLossError
from slimstart.inputs import as_batch
from slimstart.steps.eager import LossFunction, forward_only, loss_of
from slimstart.steps.structure import Structure

Batches = Sequence[tuple[Any, ...]]


def choose_mask(
    structure: Structure, batches: Batches | None, loss_fn: LossFunction | None, num_samples: int
) -> Tensor:
    """The final mask (U,): of several samples the one with the least loss, or, without batches, the likeliest."""
    networks = structure.networks
    costs = networks.graph.costs
    if batches is None:
        return costs.at_least_one(structure.learner.best_guess())
    masks = structure.learner.candidates(num_samples)
    measured = as_loss(loss_fn, needed=len(masks) > 1)

    def averaged(net: nn.Module, *batch: Any) -> Tensor:
        loss, _ = loss_of(measured(net, *batch))
        return structure.process_group.average([loss], num_examples(batch)).losses[0]

    best = least_loss(networks.references.of_masks(masks), batches, averaged) if len(masks) > 1 else 0
    return costs.at_least_one(masks[best])


def first_batches(batches: Iterable[Any] | None, most: int) -> list[tuple[Any, ...]] | None:
    """The first batches, each as a tuple of arguments for a loss function; None without batches."""
    if batches is None:
        return None
    seen = list(map(as_batch, islice(batches, most)))
    if not seen:
        raise ValueError("`batches` is empty; give some training batches, to choose a mask and to measure statistics")
    return seen


def as_loss(loss_fn: LossFunction | None, needed: bool = False) -> LossFunction:
    """The user's loss function, or, where only statistics are measured, a plain forward of the network."""
    if loss_fn is None and needed:
        raise ValueError("`loss_fn` is None; to choose among masks by their loss on `batches`, give the loss function")
    return forward if loss_fn is None else loss_fn


def forward(net: nn.Module, inputs: Any, *_: Any) -> Any:
    """Call a network on the inputs of a batch: the first item of a tuple, or a dict of keyword arguments."""
    return net(**inputs) if isinstance(inputs, Mapping) else net(inputs)


def least_loss(networks: Iterable[nn.Module], batches: Batches, loss_fn: LossFunction) -> int:
    """The index of the network with the least loss on the batches; it may be one module that changes in between.

    Raises:
        NonFiniteLossError: no network has a finite loss.
    """
    totals = []
    for network in networks:
        losses = [float(forward_only(loss_fn, network, batch)) for batch in batches]
        totals.append(sum(losses) if all(map(math.isfinite, losses)) else math.inf)
    best = totals.index(min(totals))
    if not math.isfinite(totals[best]):
        raise NonFiniteLossError("no mask has a finite loss on `batches`; go back to a checkpoint")
    return best

"""The end of a search: choose a mask by its loss, and hand out the network that belongs to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from slimstart.errors import NonFiniteLossError
from slimstart.graph import Selection
from slimstart.inputs import as_batch
from slimstart.narrow import compact, recalibrate
from slimstart.narrow.state_hooks import remove_from
from slimstart.steps import forward_without_trace
from slimstart.steps.eager import LossFunction

Batches = Sequence[tuple[Any, ...]]


def first_batches(batches: Iterable[Any], most: int) -> list[tuple[Any, ...]]:
    """The first batches, each as a tuple of what a loss function takes."""
    seen = list(map(as_batch, islice(batches, most)))
    if not seen:
        raise ValueError("`batches` is empty; give some training batches, to choose a mask and to measure statistics")
    return seen


def least_loss(networks: Iterable[nn.Module], batches: Batches, loss_fn: LossFunction) -> int:
    """Which of the networks has the least loss on the batches; they may be one module that changes in between.

    Raises:
        NonFiniteLossError: no network has a finite loss.
    """
    totals = []
    for network in networks:
        losses = [float(forward_without_trace(loss_fn, network, batch)) for batch in batches]
        totals.append(sum(losses) if all(map(math.isfinite, losses)) else math.inf)
    best = totals.index(min(totals))
    if not math.isfinite(totals[best]):
        raise NonFiniteLossError("no mask has a finite loss on `batches`; go back to a checkpoint")
    return best


def finished(
    model: nn.Module,
    selection: Selection,
    batches: Batches | None,
    loss_fn: LossFunction | None,
    plain: bool,
    device: torch.device | None = None,
) -> nn.Module:
    """A narrow copy of the model that stands on its own, with statistics measured on the batches if there are any.

    Args:
        device: for the copy, if not that of the model.
    """
    small = compact(model, selection, plain)
    if device is not None:
        small.to(device)
    remove_from(small)
    if batches is not None and loss_fn is not None:
        recalibrate(small, batches, loss_fn)
    return small

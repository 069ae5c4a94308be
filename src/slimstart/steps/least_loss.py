"""Batches of a user, for choosing among networks by their loss and for measuring statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import nn

from slimstart.errors import NonFiniteLossError
from slimstart.inputs import as_batch
from slimstart.steps import forward_without_trace
from slimstart.steps.eager import LossFunction

Batches = Sequence[tuple[Any, ...]]


def first_batches(batches: Iterable[Any], most: int) -> list[tuple[Any, ...]]:
    """The first batches, each as a tuple of what a loss function takes."""
    seen = list(map(as_batch, islice(batches, most)))
    if not seen:
        raise ValueError("`batches` is empty; give some training batches, to choose a mask and to measure statistics")
    return seen


def as_loss(loss_fn: LossFunction | None, needed: bool = False) -> LossFunction:
    """The user's loss function, or, to measure statistics alone, a call of the network on the first item of a batch.

    Raises:
        ValueError: losses are needed and there is no function.
    """
    if loss_fn is None and needed:
        raise ValueError("`loss_fn` is None; to choose among masks by their loss on `batches`, give the loss function")
    return forward if loss_fn is None else loss_fn


def forward(net: nn.Module, inputs: Any, *_: Any) -> Any:
    """Call a network on the inputs of a batch: the first item of a tuple, or a dict of keyword arguments."""
    return net(**inputs) if isinstance(inputs, Mapping) else net(inputs)


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

"""Training steps written out, with a stopwatch behind each part: what captured steps cannot be asked for."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.lab.run.make_method import Batch
from slimstart.lab.run.timing import Stopwatch
from slimstart.steps import LossFunction
from slimstart.training import SparseTraining


def plain_step(net: nn.Module, optimizer: Optimizer, loss_fn: LossFunction, batch: Batch, watch: Stopwatch) -> None:
    """A step of a network whose structure does not change."""
    loss = loss_fn(net, *batch)
    watch.lap("forward")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    watch.lap("backward")
    optimizer.step()
    watch.lap("other")


def search_step(sparse: SparseTraining, loss_fn: LossFunction, batch: Batch, watch: Stopwatch) -> None:
    """A step of a search by hand, all forwards in one part."""
    loss = loss_fn(sparse.model, *batch)
    with torch.no_grad():
        references = [loss_fn(net, *batch) for net in sparse.references()]
    watch.lap("forward")
    optimizer = sparse.optimizer
    assert isinstance(optimizer, Optimizer)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    watch.lap("backward")
    optimizer.step()
    if sparse.policy.learns_from == "losses":
        sparse.update(loss, references)
    watch.lap("other")

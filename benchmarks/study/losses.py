"""Losses of sampled networks of a search, with its weights, on training batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from slimstart.devices import cuda_devices
from slimstart.errors import ConfigError, NonFiniteLossError
from slimstart.lab.run.make_method import Batch, Method, Search
from slimstart.lab.run.program import Program
from slimstart.narrow.compact import masked
from slimstart.policies import PaperSearch


def training_batches(program: Program, num_batches: int, seed: int = 0) -> Iterator[Batch]:
    """Training batches of epochs that come after the training."""
    first = program.recipe.total_epochs + 1 + seed  # that of `total_epochs` itself is for calibration
    epochs = (program.task.data.train.epoch(number) for number in itertools.count(first))
    return itertools.islice(itertools.chain.from_iterable(epochs), num_batches)


def search_in(method: Method) -> tuple[Search, PaperSearch]:
    """The method as a `Search`, and its learner, which has the keep-probabilities.

    Raises:
        ConfigError: the method does not search by the paper's policy, or its search is over.
    """
    if not isinstance(method, Search) or not isinstance(method.sparse.learner, PaperSearch):
        raise ConfigError("`method` has no keep-probabilities to study; give --method slimstart, or the run of one")
    if method.sparse.settled:
        raise ConfigError(
            "the search is over at this checkpoint, and the weights belong to one mask; give a run that was stopped "
            "earlier, or one with --settle-at 1 and without fine-tuning"
        )
    return method, method.sparse.learner


class MaskedLosses:
    """L(m) for any mask, with the current weights of a search, in training mode.

    Other random numbers of the network (dropout) are the same for all masks of a batch. The weights, statistics and
    random state of the training do not change.
    """

    def __init__(self, search: Search) -> None:
        self._loss_fn, self._graph, self._dense = search.loss_fn, search.sparse.graph, search.sparse.dense_copy()

    def __call__(self, masks: Tensor, batch: Batch, seed: int) -> Tensor:
        """The losses (n,), float64 on the CPU, of raw draws (n, U); the device is synchronised once, at the end.

        Args:
            seed: for random operations of the network.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite.
        """
        found = []
        with torch.no_grad(), torch.random.fork_rng(cuda_devices(self._dense)):
            for mask in masks:
                network = masked(self._dense, self._graph.select(mask))
                torch.manual_seed(seed)
                found.append(self._loss_fn(network, *batch).double())
        losses = torch.stack(found).cpu()
        if not bool(losses.isfinite().all()):
            raise NonFiniteLossError("a sampled network's loss is not finite; there is nothing to measure here")
        return losses

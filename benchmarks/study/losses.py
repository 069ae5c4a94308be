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
from slimstart.policies import PaperSearch
from slimstart.steps.cuda_graph import Graphed
from study.masked_network import MaskedNetwork


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
        sparse = search.sparse
        self._loss_fn = search.loss_fn
        self._network = MaskedNetwork(sparse.dense_copy(), sparse.graph)
        self._device = next(sparse.model.parameters()).device
        self._mask = torch.zeros(sparse.graph.num_units, dtype=torch.bool, device=self._device)
        self._batch: list[Tensor] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        # A forward of a small network takes a GPU less time than its launch takes the host.
        self._forward = Graphed(self._run) if sparse.engine == "graphs" else self._run

    def __call__(self, masks: Tensor, batch: Batch, seed: int) -> Tensor:
        """The losses (n,), float64 on the CPU, of raw draws (n, U); the device is synchronised once, at the end.

        Args:
            batch: all batches have one shape.
            seed: for random operations of the network.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite.
        """
        if not self._batch:
            self._batch = [tensor.clone() for tensor in batch]
        for own, tensor in zip(self._batch, batch, strict=True):
            own.copy_(tensor)
        masks, found = masks.to(self._device), torch.empty(len(masks), dtype=torch.float64, device=self._device)
        devices = cuda_devices(self._network.module)
        # Not torch.manual_seed, which queues a call for a GPU that is not in use, every time.
        generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
        with torch.no_grad(), torch.random.fork_rng(devices):
            for number, mask in enumerate(masks):
                for generator in generators:
                    generator.manual_seed(seed)
                self._mask.copy_(mask)
                self._forward()
                found[number] = self._loss
        losses = found.cpu()
        if not bool(losses.isfinite().all()):
            raise NonFiniteLossError("a sampled network's loss is not finite; there is nothing to measure here")
        return losses

    def _run(self) -> None:
        self._network.set_(self._mask)
        self._loss.copy_(self._loss_fn(self._network.module, *self._batch))

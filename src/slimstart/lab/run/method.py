"""The protocol between the program and training methods, and the loss and the optimizer that all of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from slimstart.graph import ChannelGraph
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.evaluation import logits_of
from slimstart.lab.run.train_cost import Ledger

Batch = tuple[Tensor, Tensor]
Wrap = Callable[[nn.Module], nn.Module]
"""Called with a network, returns what runs in its place: `DistributedDataParallel`."""


class Loss:
    """Cross-entropy of a network on a batch, in the precision of the recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.label_smoothing = recipe.label_smoothing
        self.precision = recipe.precision

    def __call__(self, net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        logits = logits_of(net, images, self.precision)
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)


class Method(Protocol):
    """A training method, as the program uses it."""

    graph: ChannelGraph
    ledger: Ledger

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the network that the next step trains."""

    @property
    def engine(self) -> str:
        """How steps run: "eager" or "graphs"."""

    @property
    def building_seconds(self) -> float | None:
        """Time spent on graph capture, rebuilding and warm-up; None without graphs."""

    @property
    def flops(self) -> int:
        """FLOPs of one image through the network that the next step trains, as executed."""

    @property
    def formula_flops(self) -> float | None:
        """FLOPs of one image in one step by the formulas of the paper's appendix; None for steps they do not count."""

    @property
    def searching(self) -> bool:
        """Whether the structure still changes."""

    @property
    def keep_probs(self) -> Tensor | None:
        """Keep-probabilities s; None where the method has none."""

    @property
    def expected_cost(self) -> float | None:
        """Expected cost in the unit of the budget, as a fraction of dense; None without a search."""

    @property
    def widths(self) -> Mapping[str, int] | None:
        """Filters of every layer in the network of the last step; 0 for a removed layer, None without a search."""

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch; returns the detached loss."""

    def begin_epoch(self, epoch: int, batches: Iterable[Batch]) -> None:
        """Prepare an epoch, once: fix the structure, cut, or draw.

        Args:
            epoch: counted from 0 over the whole run.
            batches: batches of training images, made when they are iterated over.
        """

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        """The present network, for validation; training is not affected."""

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        """The trained network."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on, as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The optimizer that a recipe names, over all parameters of a model."""
    common: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        return SGD(model.parameters(), momentum=recipe.momentum or 0.0, nesterov=bool(recipe.nesterov), **common)
    common["eps"] = recipe.eps
    if recipe.optimizer == "rmsprop":
        return RMSprop(model.parameters(), momentum=recipe.momentum or 0.0, alpha=recipe.beta2 or 0.0, **common)
    kind = Adam if recipe.optimizer == "adam" else AdamW
    return kind(model.parameters(), betas=(recipe.beta1 or 0.0, recipe.beta2 or 0.0), **common)

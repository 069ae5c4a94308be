"""What a way to train is: the protocol between the program and its methods, and what all of them share."""

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
    """What the program asks of a way to train."""

    graph: ChannelGraph
    ledger: Ledger

    @property
    def optimizer(self) -> Optimizer:
        """Of the network that the next step trains."""

    @property
    def engine(self) -> str:
        """What runs the steps: "eager" or "graphs"."""

    @property
    def building_seconds(self) -> float | None:
        """Time spent on capturing graphs, and on what runs eagerly before; None where there are none."""

    @property
    def flops(self) -> int:
        """FLOPs of one image through the network that the next step trains, as executed."""

    @property
    def formula_flops(self) -> float | None:
        """FLOPs of one image in one step by the formulas of the paper's appendix; None where it counts nothing."""

    @property
    def searching(self) -> bool:
        """Whether the structure still changes."""

    @property
    def keep_probs(self) -> Tensor | None:
        """s, if there is one."""

    @property
    def expected_cost(self) -> float | None:
        """What the budget limits, as a fraction of dense, if there is a search."""

    @property
    def widths(self) -> Mapping[str, int] | None:
        """Filters of every layer in the network of the last step; None where the structure is not learned."""

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch; returns the detached loss."""

    def begin_epoch(self, epoch: int, batches: Iterable[Batch]) -> None:
        """Do what is due before an epoch, once: fix the structure, cut, draw.

        Args:
            epoch: counted from 0 over the whole run.
            batches: of training images; nothing is made until they are asked for.
        """

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        """The network as it stands, for validation; training goes on untouched."""

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        """The trained network."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values: everything that the next steps depend on."""

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

"""Ways to train, behind one small protocol: the program does not know which one it runs.

`Fixed` trains a network whose structure does not change (dense, or narrow from the start); `Search` is Algorithm 1.
Each keeps its own ledger of the FLOPs that it executes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from slimstart.accounting import counting, flops
from slimstart.accounting.train_cost import FirstLayers, Ledger, first_layers
from slimstart.baselines import narrow
from slimstart.engine import PlainTraining
from slimstart.errors import CheckpointError
from slimstart.graph import ChannelGraph, trace
from slimstart.recipes.evaluation import logits_of
from slimstart.recipes.recipe import Recipe
from slimstart.structure import Flops
from slimstart.subnet import compact
from slimstart.training import SparseTraining

Batch = tuple[Tensor, Tensor]


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
    optimizer: Optimizer
    ledger: Ledger

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
    def expected_flops(self) -> float:
        """The same in expectation over masks, and without zeros of padding."""

    @property
    def searching(self) -> bool:
        """Whether the structure still changes."""

    @property
    def keep_probs(self) -> Tensor | None:
        """s, if there is one."""

    @property
    def expected_cost(self) -> float | None:
        """What the budget limits, as a fraction of dense, if there is a search."""

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch; returns the detached loss."""

    def settle(self, batches: Iterable[Batch]) -> None:
        """Fix the structure."""

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        """The network as it stands, for validation; training goes on untouched."""

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        """The trained network."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values: everything that the next steps depend on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


def sgd(recipe: Recipe, model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)


def alignment(recipe: Recipe, device: torch.device, engine: str) -> int:
    """Widths of a network that is narrowed by hand are multiples of this, as those of a search are."""
    return recipe.align or (8 if device.type == "cuda" and engine != "eager" else 1)


def make_method(
    recipe: Recipe, model: nn.Module, example: Tensor, steps_per_epoch: int, engine: str = "auto"
) -> Method:
    """The method that a recipe names, around a freshly initialised dense model.

    Args:
        example: one image, as a batch.
        engine: as for `SparseTraining`.
    """
    if recipe.method == "slimstart":
        return Search(recipe, model, example, steps_per_epoch, engine)
    graph = trace(model, example, coupling="stream")
    budget = recipe.parsed_budget
    if budget is None:
        network = compact(model, graph.select(torch.ones(graph.num_units, dtype=torch.bool)))
    else:
        network = narrow(model, graph, budget, alignment(recipe, example.device, engine))
    return Fixed(recipe, graph, network, example, engine)


class Fixed:
    """Plain training of a network whose structure does not change."""

    searching = False
    keep_probs = None
    expected_cost = None
    building_seconds = None

    def __init__(
        self, recipe: Recipe, graph: ChannelGraph, network: nn.Module, example: Tensor, engine: str = "auto"
    ) -> None:
        self.graph, self.network, self.loss_fn = graph, network, Loss(recipe)
        self.optimizer = sgd(recipe, network)
        self._training = PlainTraining(network, self.optimizer, engine=engine)
        self.ledger = Ledger()
        self.engine = self._training.engine
        self.flops = self.expected_flops = flops(network, example)
        self._input_gradient = first_layers(network, example).input_gradient()

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = self._training.step(self.loss_fn, images, labels)
        self.ledger.step(len(images), self.flops, self._input_gradient)
        return loss

    def settle(self, batches: Iterable[Batch]) -> None:
        pass

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        return self.network

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        return self.network

    def state_dict(self) -> dict[str, Any]:
        return {
            "network": {name: tensor.clone() for name, tensor in self.network.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "ledger": asdict(self.ledger),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            self.ledger = Ledger(**state["ledger"])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint is of another network: {error}") from error


class Search:
    """Algorithm 1, then a fixed structure."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, example: Tensor, steps_per_epoch: int, engine: str = "auto"
    ) -> None:
        self.loss_fn, self.num_masks = Loss(recipe), recipe.num_masks
        self.optimizer = sgd(recipe, model)
        self.sparse = SparseTraining(
            model,
            self.optimizer,
            example,
            recipe.parsed_budget,
            coupling=recipe.coupling,
            estimator=recipe.estimator,
            sampling=recipe.sampling,
            structure_lr=recipe.structure_lr,
            resample_every=recipe.resample_every,
            total_steps=max(1, recipe.search_epochs * steps_per_epoch),
            align=recipe.align,
            engine=engine,
            seed=recipe.seed,
        )
        self.graph, self.engine = self.sparse.graph, self.sparse.engine
        self.ledger = Ledger()
        self._nominal = Flops(1.0).bind(self.graph.costs)
        self._first: FirstLayers = first_layers(model, example)

    @property
    def searching(self) -> bool:
        return not self.sparse.settled

    @property
    def keep_probs(self) -> Tensor:
        return self.sparse.keep_probs

    @property
    def expected_cost(self) -> float:
        return self.sparse.expected_cost

    @property
    def building_seconds(self) -> float | None:
        return self.sparse.building_seconds if self.engine == "graphs" else None

    @property
    def flops(self) -> int:
        return self.sparse.executed_flops

    @property
    def expected_flops(self) -> float:
        return float(self._nominal.expected(self.keep_probs))

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        runs = self.sparse.executed
        input_gradient = self._first.input_gradient({**self._first.filters, **runs.num_filters})
        loss = self.sparse.step(self.loss_fn, images, labels)
        self.ledger.step(len(images), runs.flops, input_gradient, sum(runs.reference_flops))
        return loss

    def settle(self, batches: Iterable[Batch]) -> None:
        with counting() as count:
            self.sparse.settle(batches, self.loss_fn, self.num_masks)
        self.ledger.selection += count.total

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        return self.sparse.snapshot(batches, self.loss_fn)

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        with counting() as count:
            network = self.sparse.finish(batches, self.loss_fn, self.num_masks)
        self.ledger.selection += count.total
        return network

    def state_dict(self) -> dict[str, Any]:
        return {"sparse": self.sparse.state_dict(), "ledger": asdict(self.ledger)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"sparse", "ledger"}:
            raise CheckpointError("the checkpoint is of another method")
        self.sparse.load_state_dict(state["sparse"])
        self.ledger = Ledger(**state["ledger"])

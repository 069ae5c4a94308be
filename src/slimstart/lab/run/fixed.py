"""Plain training of a network whose structure does not change: dense, uniform, shallow and random.

`Stage` is also a building block of methods that train one network after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.errors import CheckpointError
from slimstart.flop_counter import flops
from slimstart.graph import ChannelGraph
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.method import Batch, Loss, Wrap, make_optimizer
from slimstart.lab.run.train_cost import Ledger, first_layers, formula_flops
from slimstart.lab.run.weight_average import WeightAverage
from slimstart.steps import PlainTraining


class Stage:
    """Plain training of one network, with an optimizer of its own.

    Args:
        wrapped: a module around the network that is run in its place.
        wrap: called with the network, returns what runs in its place: `DistributedDataParallel`.
        also: as for `PlainTraining`.
    """

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        example: Tensor,
        engine: str,
        wrapped: nn.Module | None = None,
        also: Callable[[Tensor], None] | None = None,
        wrap: Wrap | None = None,
    ) -> None:
        self.network, self.optimizer = network, make_optimizer(recipe, network)
        runs = wrapped or network
        self._training = PlainTraining(runs if wrap is None else wrap(runs), self.optimizer, engine=engine, also=also)
        self.flops = flops(network, example)
        self._input_gradient = first_layers(network, example).input_gradient()

    @property
    def engine(self) -> str:
        return self._training.engine

    def step(self, loss_fn: Callable[..., Tensor], images: Tensor, labels: Tensor, ledger: Ledger) -> Tensor:
        """One step, entered into the ledger."""
        loss: Tensor = self._training.step(loss_fn, images, labels)
        ledger.step(round(self._training.num_examples), self.flops, self._input_gradient)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {
            "network": {name: tensor.clone() for name, tensor in self.network.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint is of another network: {error}") from error


class Staged:
    """Properties of a method that trains in stages: those of its present stage."""

    building_seconds = None
    widths = None
    _stage: Stage

    @property
    def optimizer(self) -> Optimizer:
        return self._stage.optimizer

    @property
    def engine(self) -> str:
        return self._stage.engine

    @property
    def flops(self) -> int:
        return self._stage.flops


class Fixed(Staged):
    """One stage, from the first step to the last."""

    searching = False
    keep_probs = None
    expected_cost = None

    def __init__(
        self,
        recipe: Recipe,
        graph: ChannelGraph,
        network: nn.Module,
        example: Tensor,
        engine: str = "auto",
        wrap: Wrap | None = None,
    ) -> None:
        self.graph, self.loss_fn, self.ledger = graph, Loss(recipe), Ledger()
        self._stage = Stage(recipe, network, example, engine, wrap=wrap)
        self._average = None if recipe.ema_decay is None else WeightAverage(recipe.ema_decay, network)
        self.formula_flops = formula_flops(self.flops, self.flops)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = self._stage.step(self.loss_fn, images, labels, self.ledger)
        if self._average is not None:
            self._average.update(self._stage.network)
        return loss

    def begin_epoch(self, epoch: int, batches: Iterable[Batch]) -> None:
        pass

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        network = self._stage.network
        return network if self._average is None else self._average.write_to(copy.deepcopy(network))

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        return self._stage.network if self._average is None else self._average.write_to(self._stage.network)

    def state_dict(self) -> dict[str, Any]:
        average = None if self._average is None else self._average.state_dict()
        return {**self._stage.state_dict(), "average": average, "ledger": asdict(self.ledger)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"network", "optimizer", "average", "ledger"}:
            raise CheckpointError("the checkpoint is of another method")
        self._stage.load_state_dict(state)
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        self.ledger = Ledger(**state["ledger"])

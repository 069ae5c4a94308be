"""The method slimstart: a search, by Algorithm 1 or another policy, then a fixed structure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from torch import Tensor, nn

from slimstart.devices import device_of
from slimstart.errors import CheckpointError
from slimstart.flop_counter import counting
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.method import Batch, Loss, Wrap, make_optimizer
from slimstart.lab.run.train_cost import FirstLayers, Ledger, first_layers, formula_flops
from slimstart.lab.run.weight_average import WeightAverage
from slimstart.policies import EqualWorth, Flops, Policy, equal_worth, get_policy
from slimstart.training import SparseTraining


def policy_of(recipe: Recipe, steps_per_epoch: int) -> Policy:
    """The policy that a recipe names, with the recipe's settings.

    The search takes the epochs of the recipe; with `EqualWorth` its own share of the training, if that is less.
    """
    policy = get_policy(recipe.policy)
    own = {field.name for field in fields(policy)}  # type: ignore[arg-type]
    names = own & {"estimator", "sampling", "structure_lr", "depth", "resample_every", "align", "seed"}
    given = {name: getattr(recipe, name) for name in names if getattr(recipe, name) is not None}
    search_steps = max(1, recipe.search_epochs * steps_per_epoch)
    share = equal_worth.SEARCHED * recipe.total_epochs * steps_per_epoch
    if not isinstance(policy, EqualWorth) or search_steps < share:
        given["search_steps"] = search_steps
    return replace(policy, **given)  # type: ignore[type-var]


class Search:
    """A search by a policy, then a fixed structure."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        example: Tensor,
        steps_per_epoch: int,
        engine: str = "auto",
        wrap: Wrap | None = None,
    ) -> None:
        assert recipe.parsed_budget is not None
        self.loss_fn, self.num_masks, self._model = Loss(recipe), recipe.num_masks, model
        self._search_epochs = recipe.search_epochs
        self.optimizer = make_optimizer(recipe, model)
        self._first: FirstLayers = first_layers(model, example.to(device_of(model)))  # of the dense model
        self.sparse = SparseTraining(
            model,
            self.optimizer,
            example,
            recipe.parsed_budget,
            total_steps=max(1, recipe.total_epochs * steps_per_epoch),
            policy=policy_of(recipe, steps_per_epoch),
            coupling=recipe.coupling,
            engine=engine,
            full_model_device=recipe.full_model_device,
        )
        self._wrapped = None if wrap is None else wrap(model)  # several processes: `step` finds it
        self.graph = self.sparse.dense_graph
        self._average = None
        if recipe.ema_decay is not None:
            self._average = WeightAverage(recipe.ema_decay, model)
            self.sparse.follow(self._average.network)
        self.ledger = Ledger()
        self._nominal = Flops(1.0).bind(self.sparse.graph.costs)
        self.widths: Mapping[str, int] | None = None

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
    def engine(self) -> str:
        return self.sparse.engine

    @property
    def building_seconds(self) -> float | None:
        return self.sparse.building_seconds if self.engine == "graphs" else None

    @property
    def flops(self) -> int:
        return self.sparse.executed_flops

    @property
    def formula_flops(self) -> float | None:
        """All forwards of a step, and a backward as two, on a network of the expected FLOPs; None after the search."""
        if not self.searching:
            return None
        expected = float(self._nominal.expected(self.keep_probs))
        return formula_flops(self.sparse.learner.num_masks * expected, expected)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        runs = self.sparse.executed
        self.widths = {name: runs.num_filters.get(name, 0) for name in self.graph.filters}
        input_gradient = self._first.input_gradient({**self._first.filters, **runs.num_filters})
        loss: Tensor = self.sparse.step(self.loss_fn, images, labels)
        if self._average is not None:
            self._average.update(self._model)
        self.ledger.step(round(self.sparse.num_examples), runs.flops, input_gradient, sum(runs.reference_flops))
        return loss

    def begin_epoch(self, epoch: int, batches: Iterable[Batch]) -> None:
        if self.sparse.settled or epoch < self._search_epochs:
            return
        with counting() as count:
            self.sparse.settle(batches, self.loss_fn, self.num_masks)
        self.ledger.selection += self._over_ranks(count.total)

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        if self._average is not None:  # which has running statistics of its own
            return self._average.write_to(self.sparse.snapshot())
        return self.sparse.snapshot(batches, self.loss_fn)

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        if self._average is not None:
            return self._average.write_to(self.sparse.finish())
        with counting() as count:
            network = self.sparse.finish(batches, self.loss_fn, self.num_masks)
        self.ledger.selection += self._over_ranks(count.total)
        return network

    def _over_ranks(self, flops: int) -> int:
        """The sum over all processes."""
        return sum(self.sparse.process_group.gather(flops))

    def state_dict(self) -> dict[str, Any]:
        average = None if self._average is None else self._average.state_dict()
        return {"sparse": self.sparse.state_dict(), "average": average, "ledger": asdict(self.ledger)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"sparse", "average", "ledger"}:
            raise CheckpointError("the checkpoint is of another method")
        self.sparse.load_state_dict(state["sparse"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        self.ledger = Ledger(**state["ledger"])

"""Methods that train the dense network, cut it, and retrain the pruned network: in one cut, or in several rounds.

They differ in how the cut is chosen (a function of `lab.methods`), in what they add to the loss of the dense network
(network slimming), and in what they do after every epoch (soft pruning). The first cut is made when fine-tuning begins;
several rounds are spread evenly over the fine-tuning, each with a budget between the dense network and the final one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.devices import evaluating
from slimstart.errors import CheckpointError
from slimstart.flop_counter import counting
from slimstart.graph import trace
from slimstart.lab.methods import PRUNERS, ROUNDS, slimming, soft_filter
from slimstart.lab.methods.pruning import Trained, even_rounds
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.fixed import Stage, Staged
from slimstart.lab.run.method import Batch, Loss
from slimstart.lab.run.train_cost import Ledger, formula_flops
from slimstart.narrow import compact, recalibrate
from slimstart.policies import BoundBudget


class Pruned(Staged):
    """Train dense, cut, train on."""

    searching = False
    keep_probs = None
    expected_cost = None

    def __init__(self, recipe: Recipe, model: nn.Module, example: Tensor, engine: str = "auto") -> None:
        assert recipe.parsed_budget is not None
        self._recipe, self._example, self._engine = recipe, example, engine
        self._budget, self.ledger = recipe.parsed_budget, Ledger()
        self.graph = trace(model, example, coupling="stream")
        self._bound: BoundBudget = self._budget.bind(self.graph.costs)  # refuses budgets that cannot be met
        self._fractions = ROUNDS.get(recipe.method, even_rounds)(self.graph, self._bound, recipe.rounds)
        self._is_soft = recipe.method == "soft" and recipe.protocol != "uniform"
        self._loss_fn = Loss(recipe)
        self._penalty = recipe.penalty if recipe.method == "slimming" else 0.0
        if recipe.method == "slimming":
            slimming.scales(model, self.graph)  # refuses networks without batch norm
        self._masks: list[Tensor] = []  # of the cuts so far, each over the units of the network before it
        self._stage = Stage(recipe, model, example, engine)

    @property
    def formula_flops(self) -> float:
        return formula_flops(self._stage.flops, self._stage.flops)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        return self._stage.step(self._dense_loss if not self._masks else self._loss_fn, images, labels, self.ledger)

    def _dense_loss(self, net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        loss = self._loss_fn(net, images, labels)
        return loss + self._penalty * slimming.penalty(net) if self._penalty else loss

    def begin_epoch(self, epoch: int, batches: Iterable[Batch]) -> None:
        recipe = self._recipe
        if self._is_soft and 0 < epoch <= recipe.epochs:
            self._soften_(self._stage.network)
        into = epoch - recipe.epochs
        if into >= 0 and len(self._masks) < 1 + into * recipe.rounds // recipe.finetune_epochs:
            self._cut(batches, len(self._masks) + 1)

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        if not self._is_soft or self._masks:
            return self._stage.network
        network = deepcopy(self._stage.network)
        self._soften_(network)
        return network

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        if len(self._masks) < self._recipe.rounds:
            seen = list(batches)
            if self._is_soft:
                self._soften_(self._stage.network)
            self._cut(seen, self._recipe.rounds)
            with counting() as count:
                recalibrate(self._stage.network, seen, self._loss_fn)
            self.ledger.selection += count.total
        return self._stage.network

    def _soften_(self, network: nn.Module) -> None:
        protocol = self._recipe.protocol
        kept = soft_filter.mask(network, self.graph, self._bound, protocol)
        soft_filter.zero_(network, self.graph, kept, protocol)

    def _cut(self, batches: Iterable[Batch], number: int) -> None:
        """Cut the present network: the `number`-th round, counted from 1."""
        recipe, network = self._recipe, self._stage.network
        graph = trace(network, self._example, coupling="stream")
        budget = self._budget.scaled(self._fractions[number - 1] * self._bound.dense / self._bound.limit)
        of_the_dense = replace(graph.costs, whole=self.graph.costs)
        with counting() as count, evaluating(network), torch.no_grad():
            trained = Trained(
                network,
                graph,
                budget.bind(of_the_dense),
                list(batches),
                self._loss_fn,
                protocol=recipe.protocol,
                round=number,
                num_rounds=recipe.rounds,
                generator=torch.Generator().manual_seed(recipe.seed),
            )
            mask = PRUNERS[recipe.method](trained)
        self.ledger.selection += count.total
        self._apply(mask)

    def _apply(self, mask: Tensor) -> None:
        graph = trace(self._stage.network, self._example, coupling="stream")
        network = compact(self._stage.network, graph.select(mask))
        self._masks.append(mask)
        self._stage = Stage(self._recipe, network, self._example, self._engine)

    def state_dict(self) -> dict[str, Any]:
        masks = {str(number): mask for number, mask in enumerate(self._masks)}
        return {**self._stage.state_dict(), "masks": masks, "ledger": asdict(self.ledger)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"network", "optimizer", "masks", "ledger"}:
            raise CheckpointError("the checkpoint is of another method")
        for number in range(len(self._masks), len(state["masks"])):
            self._apply(state["masks"][str(number)])
        self._stage.load_state_dict(state)
        self.ledger = Ledger(**state["ledger"])

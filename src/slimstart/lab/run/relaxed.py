"""Methods that learn the structure by the chain rule: the dense network with gates, then the narrow network.

Gradients of gates need the outputs of dropped channels, so the network is dense during the search, and the ledger
counts it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict
from itertools import islice
from typing import Any

from torch import Tensor, nn

from slimstart.errors import CheckpointError
from slimstart.flop_counter import counting
from slimstart.graph import trace
from slimstart.lab.methods.gated_network import Gated, fold_, make_gates, verify_gating
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.fixed import Stage, Staged
from slimstart.lab.run.method import Batch, Loss
from slimstart.lab.run.train_cost import Ledger, formula_flops
from slimstart.narrow import compact, recalibrate
from slimstart.steps.final_mask import least_loss

NUM_BATCHES = 4  # training batches to choose a mask by


class Relaxed(Staged):
    """A search with gates, then plain training of the narrow network."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, example: Tensor, steps_per_epoch: int, engine: str = "auto"
    ) -> None:
        assert recipe.parsed_budget is not None
        self._recipe, self._example, self._engine = recipe, example, engine
        self._loss_fn, self.ledger = Loss(recipe), Ledger()
        self.graph = trace(model, example, coupling="stream")
        verify_gating(model, self.graph, example)
        self._total_steps, self._num_steps = max(1, recipe.search_epochs * steps_per_epoch), 0
        name = "grow_efficient" if recipe.method == "grow-efficient" else recipe.estimator
        assert name is not None
        self.gates = make_gates(
            name,
            model,
            self.graph,
            recipe.parsed_budget,
            recipe.structure_lr,
            self._total_steps,
            recipe.seed,
        )
        self._mask: Tensor | None = None
        self._stage = Stage(recipe, model, example, engine, Gated(model, self.graph, self.gates), self.gates.learn_)

    @property
    def searching(self) -> bool:
        return self._mask is None

    @property
    def keep_probs(self) -> Tensor:
        return self.gates.keep_probs if self._mask is None else self._mask.double()

    @property
    def expected_cost(self) -> float:
        return self.gates.budget.share(self.keep_probs)

    @property
    def formula_flops(self) -> float | None:
        """A forward of the method's own cost and a dense backward, counted as two; None after the search."""
        return formula_flops(self.gates.forward_flops, self._stage.flops) if self.searching else None

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.searching:
            self.gates.begin_step(min(1.0, self._num_steps / self._total_steps))
            self._num_steps += 1
        return self._stage.step(self._loss_fn, images, labels, self.ledger)

    def begin_epoch(self, epoch: int, batches: Iterable[Batch]) -> None:
        if self.searching and epoch >= self._recipe.search_epochs:
            self._settle(batches)
        elif self.searching:
            self.gates.begin_epoch(epoch)

    def snapshot(self, batches: Iterable[Batch]) -> nn.Module:
        if not self.searching:
            return self._stage.network
        network = self._cut(self.gates.best_guess())
        recalibrate(network, list(batches), self._loss_fn)
        return network

    def finish(self, batches: Iterable[Batch]) -> nn.Module:
        if self.searching:
            self._settle(batches)
        return self._stage.network

    def _settle(self, batches: Iterable[Batch]) -> None:
        """Fix the mask of least loss on training batches, out of a few."""
        seen = list(batches)
        with counting() as count:
            masks = self.gates.candidates(self._recipe.num_masks)
            few = list(islice(seen, NUM_BATCHES))
            best = least_loss(map(self._cut, masks), few, self._loss_fn) if len(masks.unique(dim=0)) > 1 else 0
            network = self._cut(masks[best])
            recalibrate(network, seen, self._loss_fn)
        self.ledger.selection += count.total
        self._go_on(network, masks[best])

    def _cut(self, mask: Tensor) -> nn.Module:
        """The narrow network of a mask, with its gates in its weights."""
        folded = fold_(deepcopy(self._stage.network), self.graph, self.gates.values())
        return compact(folded, self.graph.select(mask))

    def _go_on(self, network: nn.Module, mask: Tensor) -> None:
        self._mask, self._stage = mask, Stage(self._recipe, network, self._example, self._engine)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._stage.state_dict(),
            "gates": deepcopy(self.gates.state_dict()),
            "mask": self._mask,
            "num_steps": self._num_steps,
            "ledger": asdict(self.ledger),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"network", "optimizer", "gates", "mask", "num_steps", "ledger"}:
            raise CheckpointError("the checkpoint is of another method")
        self.gates.load_state_dict(state["gates"])
        if state["mask"] is not None and self.searching:
            self._go_on(compact(self._stage.network, self.graph.select(state["mask"])), state["mask"])
        self._stage.load_state_dict(state)
        self._num_steps = state["num_steps"]
        self.ledger = Ledger(**state["ledger"])

r"""Policies: what is learned about the structure, behind one small protocol.

A policy draws masks, learns from their losses, and keeps to the budget. It knows no network: masks are flat, losses are
numbers. `BernoulliUnits` is the paper's: one keep-probability per unit,

.. math:: s \leftarrow \mathrm{proj}_\mathcal{S}(s - \mathrm{Adam}(g)), \qquad
          g \approx H^\alpha(s) \nabla_s \mathbb{E}_{p(m|s)} L(m).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.structure.budgets import BoundBudget, Budget
from slimstart.structure.estimators import Estimator, get_estimator
from slimstart.structure.probabilities import sample
from slimstart.structure.projection import Direction, project, uniform_start


class Policy(Protocol):
    """Draw masks; update from their losses; propose what to settle on; save and restore."""

    num_masks: int
    """Masks per draw, and losses per update. The first is trained, the others are references."""

    @property
    def keep_probs(self) -> Tensor:
        """(U,) float64 on the CPU; a copy."""

    @property
    def expected_cost(self) -> float:
        """What the budget limits, in expectation over masks, as a fraction of the dense network's."""

    def draw(self) -> Tensor:
        """(num_masks, U) raw masks; `update` refers to those of the last draw."""

    def update(self, losses: Tensor) -> None:
        """Learn from the losses (num_masks,) of the last draw, once per draw."""

    def best_guess(self) -> Tensor:
        """One mask (U,) within the budget that stands for the present state; changes nothing."""

    def candidates(self, n: int) -> Tensor:
        """(n, U) drawn masks, each within the budget."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only: safe for `torch.load(weights_only=True)`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`: what follows is bit-equal to what followed there."""


class BernoulliUnits:
    """The paper's policy: independent keep-probabilities, a policy gradient, Adam, and the projection on the budget.

    Where s reaches 0 or 1 its score is 0, and only Adam's momentum or the projection moves it again.

    Args:
        table: the network's cost table.
        budget: `Channels`, `Params` or `Flops`.
        estimator: a name in `ESTIMATORS`, or an `Estimator`.
        alpha: exponent of the preconditioner, in [0, 1].
        lr: Adam's learning rate for s.
        total_steps: number of updates over which `lr` falls to 0 along a cosine; None keeps it constant.
        seed: of the masks.
        direction: see `project`.
    """

    def __init__(
        self,
        table: CostTable,
        budget: Budget,
        estimator: str | Estimator = "vr_pge",
        *,
        alpha: float = 0.5,
        lr: float = 12e-3,
        total_steps: int | None = None,
        seed: int = 0,
        direction: Direction = "uniform",
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alpha` is {alpha}; it must be in [0, 1] (the paper: 1/2)")
        if not (lr > 0 and math.isfinite(lr)):
            raise ValueError(f"`lr` is {lr}; it must be positive and finite")
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"`total_steps` is {total_steps}; it must be at least 1, or None for a constant `lr`")
        self.estimator = get_estimator(estimator)
        self.num_masks = self.estimator.num_masks
        self.budget: BoundBudget = budget.bind(table)
        self.alpha, self.lr, self.total_steps, self.direction = alpha, lr, total_steps, direction
        self.num_updates = 0
        self._table = table
        # The start is feasible; projecting it refuses a wrong `direction` here and not at the first update.
        self._s = project(uniform_start(self.budget), self.budget, direction).requires_grad_()
        self._adam = torch.optim.Adam([self._s], lr=lr)
        self._generator = torch.Generator().manual_seed(seed)
        self._masks: Tensor | None = None

    @property
    def keep_probs(self) -> Tensor:
        return self._s.detach().clone()

    @property
    def expected_cost(self) -> float:
        return float(self.budget.expected(self.keep_probs)) / self.budget.dense

    def draw(self) -> Tensor:
        self._masks = sample(self.keep_probs, self.num_masks, self._generator)
        return self._masks.clone()

    @torch.no_grad()
    def update(self, losses: Tensor) -> None:
        """Learn from the losses (num_masks,) of the last draw, once per draw.

        Raises:
            RuntimeError: there was no draw since the last update. Masks whose weights have been trained since give a
                biased gradient.
            ValueError: a loss is NaN or infinite, or there are too few or too many; nothing has changed then.
        """
        if self._masks is None:
            raise RuntimeError("`update` needs masks that it has not used yet; call `draw` before it")
        if losses.shape != (self.num_masks,):
            raise ValueError(
                f"`losses` has shape {tuple(losses.shape)}; {self.estimator.name} needs ({self.num_masks},)"
            )
        losses = losses.detach().cpu().double()
        if not bool(torch.isfinite(losses).all()):
            raise ValueError(f"`losses` is {losses.tolist()}; all must be finite. Keep-probabilities are unchanged")
        self._s.grad = self.estimator.gradient(losses, self._masks, self.keep_probs, self.alpha)
        if self.total_steps is not None:
            progress = min(self.num_updates / self.total_steps, 1.0)
            self._adam.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * progress)) / 2
        self._adam.step()
        self._s.copy_(project(self._s, self.budget, self.direction))
        self._s.grad = None
        self._masks = None
        self.num_updates += 1

    def best_guess(self) -> Tensor:
        """The most probable of the masks that keep, in every group, the expected number of units; cut to the budget.

        (The most probable mask of all would be empty wherever s < 1/2, as it is at the start of most searches.)
        """
        s, groups = self.keep_probs, self._table.unit_group.cpu()
        order, rank, _ = _ranks(s, groups)
        num_groups = int(groups.max()) + 1 if groups.numel() else 0
        expected = torch.zeros(num_groups, dtype=torch.float64).index_add(0, groups, s)
        mask = torch.empty_like(groups, dtype=torch.bool)
        mask[order] = rank < expected.round().clamp(min=1)[groups[order]]
        return self._within_budget(mask)

    def candidates(self, n: int) -> Tensor:
        """(n, U) drawn masks, each cut to the budget; takes random numbers from the policy's own generator."""
        if n < 1:
            raise ValueError(f"`n` is {n}; it must be at least 1")
        return torch.stack([self._within_budget(mask) for mask in sample(self.keep_probs, n, self._generator)])

    def _within_budget(self, mask: Tensor) -> Tensor:
        """The mask with as few of its least probable units removed as the budget asks, after the at-least-one rule."""
        mask = self._table.at_least_one(mask)
        if self.budget.cost(mask) <= self.budget.limit:
            return mask
        kept = mask.nonzero().squeeze(1)
        order, rank, relative = _ranks(self.keep_probs[kept], self._table.unit_group.cpu()[kept])
        # Each group's best unit goes last (the at-least-one rule would put a worse one in its place). Among equals the
        # last of a group goes first, counted in parts of the group, so that equal s make equally narrow layers.
        last_first = torch.argsort(relative, descending=True, stable=True)
        by_s = torch.argsort(self.keep_probs[kept[order[last_first]]], stable=True)
        removal = last_first[by_s]
        removal = removal[torch.argsort((rank[removal] == 0).to(torch.uint8), stable=True)]
        units = kept[order[removal]]
        too_few, enough = 0, units.numel()
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.budget.cost(_without(mask, units[:middle])) <= self.budget.limit:
                enough = middle
            else:
                too_few = middle
        return self._table.at_least_one(_without(mask, units[:enough]))

    def state_dict(self) -> dict[str, Any]:
        return {
            "keep_probs": self.keep_probs.clone(),
            "num_updates": self.num_updates,
            "adam": copy.deepcopy(self._adam.state_dict()),
            "generator": self._generator.get_state(),
            "masks": None if self._masks is None else self._masks.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"keep_probs", "num_updates", "adam", "generator", "masks"} - state.keys())
        if missing:
            raise CheckpointError(f"`state` lacks {', '.join(missing)}; it is not a `BernoulliUnits` state")
        keep_probs, masks = state["keep_probs"], state["masks"]
        if keep_probs.shape != self._s.shape:
            raise CheckpointError(
                f"`state` has {keep_probs.numel()} keep-probabilities and this network {self._s.numel()} units"
            )
        if masks is not None and masks.shape != (self.num_masks, self._s.numel()):
            raise CheckpointError(
                f"`state` has masks of shape {tuple(masks.shape)}; {self.estimator.name} draws {self.num_masks}"
            )
        with torch.no_grad():  # the state may come from a search under a larger budget
            self._s.copy_(project(keep_probs, self.budget, self.direction))
        self._adam.load_state_dict(copy.deepcopy(state["adam"]))
        self._generator.set_state(state["generator"].cpu())
        self._masks = None if masks is None else masks.clone().cpu()
        self.num_updates = int(state["num_updates"])


def _ranks(s: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Units by group and falling s: their order, and each one's rank within its group, absolute and over its size."""
    order = torch.argsort(s, descending=True, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    sizes = torch.bincount(groups)
    in_order = groups[order]
    rank = torch.arange(s.numel()) - (torch.cumsum(sizes, 0) - sizes)[in_order]
    return order, rank, rank / sizes[in_order]


def _without(mask: Tensor, units: Tensor) -> Tensor:
    mask = mask.clone()
    mask[units] = False
    return mask

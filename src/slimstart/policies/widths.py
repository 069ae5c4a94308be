r"""NestedWidths: how many units every group has, learned from pairs of networks that differ in all widths at once.

At the start of a training the channels of a layer are exchangeable; what matters is how many there are. So what is
learned is one log-width :math:`\mu_g` per group, and a group keeps its first units. A pair of networks has

.. math:: w^\pm = \mathrm{fit}(\mu \pm \sigma r), \qquad r_g = \pm 1 \text{ at random},

where `fit` moves all log-widths by one number, such that the network is the largest within the budget: every network of
a search has it exactly, not in expectation. From the two losses on one batch (Spall 1992)

.. math:: g = \frac{L(w^+) - L(w^-)}{2 \sigma} \, r,

whose mean is the gradient of the loss along each log-width, but for terms of order :math:`\sigma^2`; Adam follows it.
Groups are few, so a loss says far more of each than of a single unit among thousands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.policies.adam import Adam, AdamState
from slimstart.policies.budgets import BoundBudget, Budget
from slimstart.policies.fitting import Fit

SIGMA = 0.2
LR = 0.03


class NestedWidths:
    """A `DevicePolicy` over widths; made on the CPU. It starts from equal shares of all groups.

    Args:
        table: the network's cost table.
        budget: `Channels`, `Params` or `Flops`.
        sigma: by how much log-widths of a pair differ from their mean.
        lr: Adam's learning rate for log-widths.
        total_steps: number of updates over which `lr` falls to 0 along a cosine; None keeps it constant.
        seed: of the signs.
    """

    num_masks = 2

    def __init__(
        self,
        table: CostTable,
        budget: Budget,
        *,
        sigma: float = SIGMA,
        lr: float = LR,
        total_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("sigma", sigma), ("lr", lr)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"`{name}` is {value}; it must be positive and finite")
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"`total_steps` is {total_steps}; it must be at least 1, or None for a constant `lr`")
        self.budget: BoundBudget = budget.bind(table)  # on the CPU, always
        self.sigma = sigma
        self._table, self._generator = table, torch.Generator().manual_seed(seed)
        self._adam, self._fit = Adam(lr, total_steps), Fit(self.budget, table)
        self._host_fit = self._fit
        self._mu = self._fit(self._fit.sizes.double().log()[None])[0]
        zeros = torch.zeros_like(self._mu)
        self._moments = AdamState(zeros, zeros.clone(), torch.zeros((), dtype=torch.float64))
        self._signs = torch.zeros_like(self._mu)
        self._masks = torch.zeros(2, table.num_units, dtype=torch.bool)
        self._pending = False  # masks are drawn and not learned from

    @property
    def widths(self) -> Tensor:
        """(G,) int64 on the CPU: how many units each group has now."""
        return self._mu.cpu().exp().round().long()

    @property
    def keep_probs(self) -> Tensor:
        """1 for units of both networks of most pairs, 0 for those of none, and 1/2 between them."""
        sizes = self._mu.cpu()
        inner, outer = (self._host_fit.masks((sizes + shift).exp()) for shift in (-self.sigma, self.sigma))
        return (inner.double() + outer.double()) / 2

    @property
    def expected_cost(self) -> float:
        return self.budget.cost(self.best_guess()) / self.budget.dense

    @property
    def num_updates(self) -> int:
        return int(self._moments.num_steps)

    @property
    def capturable(self) -> bool:
        return self.budget.num_units > 0

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        return tuple(self._mu.shape)

    def to(self, device: torch.device | str) -> None:
        self._mu, self._signs, self._masks = (t.to(device) for t in (self._mu, self._signs, self._masks))
        self._moments = AdamState(*(tensor.to(device) for tensor in self._moments))
        self._adam, self._fit = self._adam.to(device), self._fit.to(device)

    def prepare(self) -> None:
        pass  # a few signs are made in no time

    def random_numbers(self) -> Tensor:
        """Signs, (G,)."""
        return torch.randint(0, 2, self.numbers_shape, generator=self._generator).double() * 2 - 1

    def draw(self) -> Tensor:
        return self.draw_with(self.random_numbers().to(self._mu.device)).clone()

    def draw_with(self, numbers: Tensor) -> Tensor:
        self._pending = True
        self._signs.copy_(numbers)
        away = self.sigma * self._signs
        return self._masks.copy_(self._fit.masks(self._fit(torch.stack([self._mu + away, self._mu - away])).exp()))

    def update(self, losses: Tensor) -> None:
        """Learn from the losses (2,) of the last draw, once per draw.

        Raises:
            RuntimeError: there was no draw since the last update.
            ValueError: a loss is not finite; nothing has changed then.
        """
        if not self._pending:
            raise RuntimeError("`update` needs masks that it has not used yet; call `draw` before it")
        if losses.shape != (2,) or not bool(torch.isfinite(losses).all()):
            raise ValueError(f"`losses` is {losses.tolist()}; it must be two finite numbers. Widths are unchanged")
        self.learn_(losses.detach().to(self._mu), torch.ones((), dtype=torch.bool, device=self._mu.device))

    @torch.no_grad()
    def learn_(self, losses: Tensor, ok: Tensor) -> None:
        gradient = (losses[0] - losses[1]) / (2 * self.sigma) * self._signs
        z, moments = self._adam.step(self._mu, gradient, self._moments)
        mu = self._fit(z[None])[0]
        for old, new in zip((self._mu, *self._moments), (mu, *moments), strict=True):
            torch.where(ok, new, old, out=old)
        self._pending = False

    def best_guess(self) -> Tensor:
        """The network of the present widths, with what rounding has left of the budget given out."""
        return self._host_fit.whole_mask(self._mu.cpu().exp())

    def candidates(self, n: int) -> Tensor:
        """(1, U): there is one network to settle on, whatever is asked for."""
        return self.best_guess()[None]

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, whatever the policy's device."""
        exp_avg, exp_avg_sq = (moment.to("cpu", copy=True) for moment in self._moments[:2])
        return {
            "log_widths": self._mu.to("cpu", copy=True),
            "num_updates": self.num_updates,
            "adam": {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
            "generator": self._generator.get_state(),
            "signs": self._signs.to("cpu", copy=True) if self._pending else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := sorted({"log_widths", "num_updates", "adam", "generator", "signs"} - state.keys()):
            raise CheckpointError(f"`state` lacks {', '.join(missing)}; it is not a `NestedWidths` state")
        if state["log_widths"].shape != self._mu.shape:
            raise CheckpointError(
                f"`state` has {state['log_widths'].numel()} widths and this network {self._mu.numel()} groups"
            )
        # In place: a captured graph goes on with these tensors.
        self._mu.copy_(state["log_widths"])
        self._moments.exp_avg.copy_(state["adam"]["exp_avg"])
        self._moments.exp_avg_sq.copy_(state["adam"]["exp_avg_sq"])
        self._moments.num_steps.fill_(state["num_updates"])
        self._generator.set_state(state["generator"].cpu())
        if state["signs"] is not None:
            self.draw_with(state["signs"].to(self._mu.device))
        self._pending = state["signs"] is not None

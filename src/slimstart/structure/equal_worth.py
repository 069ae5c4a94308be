r"""EqualWorth: as many units in every group as make one of them worth its cost, everywhere alike.

Think of a gate :math:`a_u = 1` that multiplies all that other layers read of unit u. Without the unit the loss would be
higher by about half of the curvature along its gate, and the curvature of a log-likelihood is the mean square of its
gradient. So what a unit is worth comes with the backward of every ordinary step, at no cost:

.. math:: v_u = \mathbb{E}\left[ (\partial L / \partial a_u)^2 \right].

With :math:`c_g` the cost of one more unit of group g, the widths are best where :math:`\bar v_g / c_g` is the same for
all groups: otherwise a unit less here would pay for a better one there. The units of a group are worth less, each, the
more there are, so it suffices to follow

.. math:: \log w_g \leftarrow \mathrm{fit}\left( \log w_g + \eta \log (\bar v_g / c_g) \right)

from equal shares of all groups, where `fit` moves all log-widths by one number such that the network fills the budget.
Where a group shrinks, the units that are worth least go; where it grows, units come that were never trained. The rate
:math:`\eta` falls to zero over some `rounds`, of a window of steps each; then the structure is settled by itself.

No second network is run, no mask is random, and at every step the network is exactly as large as the budget allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.structure.budgets import BoundBudget, Budget
from slimstart.structure.fitting import Fit, whole

ALIGN = 8
ROUNDS = 16
RATE = 0.5
MOST = 0.35  # by which a log-width may change in one round


class EqualWorth:
    """A `WatchingPolicy` over widths; made on the CPU.

    Args:
        table: of a network whose channels have one unit each (coupling "stream").
        budget: `Channels`, `Params` or `Flops`.
        align: large groups have multiples of so many units, because GPUs are slow at others.
        rounds: draws until the structure is settled.
        rate: of the first round.
    """

    num_masks = 1

    def __init__(
        self, table: CostTable, budget: Budget, *, align: int = ALIGN, rounds: int = ROUNDS, rate: float = RATE
    ) -> None:
        for name, value in (("align", align), ("rounds", rounds)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1")
        if not 0 < rate <= 1:
            raise ValueError(f"`rate` is {rate}; it must be in (0, 1]")
        self.budget: BoundBudget = budget.bind(table)
        self.align, self.rounds, self.rate = align, rounds, rate
        self._fit = Fit(self.budget, table)
        self._group, self._sizes = self._fit.group, self._fit.sizes
        self._log_widths = self._fit(self._sizes.double().log()[None])[0]
        self.num_rounds = 0
        self._sums = torch.zeros(table.num_units, dtype=torch.float64)  # of squares, since the last draw
        self._count = torch.zeros((), dtype=torch.float64)
        self._mask = self._wide(-torch.arange(table.num_units).double())

    @property
    def is_done(self) -> bool:
        return self.num_rounds >= self.rounds

    @property
    def widths(self) -> Tensor:
        """(G,) int64: how many units each group has now."""
        return torch.bincount(self._group[self._mask], minlength=len(self._sizes))

    @property
    def keep_probs(self) -> Tensor:
        """1 for units of the present network, 0 for the others."""
        return self._mask.double()

    @property
    def expected_cost(self) -> float:
        return self.budget.cost(self._mask) / self.budget.dense

    def to(self, device: torch.device | str) -> None:
        self._sums, self._count = self._sums.to(device), self._count.to(device)

    @torch.no_grad()
    def watch_(self, gradients: Tensor) -> None:
        squares = gradients.detach().double().square()
        ok = torch.isfinite(squares).all()  # of a bad step nothing is learned
        self._sums.add_(torch.where(ok, squares, 0))
        self._count.add_(ok)

    def draw(self) -> Tensor:
        if float(self._count) and not self.is_done:
            worth = (self._sums / self._count).cpu()
            self._learn(worth)
            self._mask = self._wide(torch.where(self._mask, worth, -1 - torch.arange(len(worth))))
            self.num_rounds += 1
            self._sums.zero_()
            self._count.zero_()
        return self._mask[None].clone()

    def _learn(self, worth: Tensor) -> None:
        """Move the log-widths towards equal worth for equal cost."""
        present, each = self._mask.double(), self._mean_cost()
        widths = self._totals(present)
        mean = self._totals(worth * present) / widths
        known = mean > 0  # a group of which nobody is known to read anything stays as wide as it is
        drive = torch.where(known, (mean / each).log(), 0.0)
        spent = torch.where(known, each * widths, 0.0)
        drive = torch.where(known, drive - (drive * spent).sum() / spent.sum().clamp(min=1e-300), 0.0)
        rate = self.rate * (1 - self.num_rounds / self.rounds)
        self._log_widths = self._fit((self._log_widths + (rate * drive).clamp(-MOST, MOST))[None])[0]

    def _mean_cost(self) -> Tensor:
        """(G,): what a unit of each group costs, one more where there is one more to be had."""
        costs, absent = self.budget.gradient(self.keep_probs), (~self._mask).double()
        some = self._totals(absent)
        return torch.where(
            some > 0,
            self._totals(costs * absent) / some.clamp(min=1),
            self._totals(costs) / self._sizes,
        ).clamp(min=1e-9 * self.budget.dense)

    def _totals(self, values: Tensor) -> Tensor:
        return torch.zeros(len(self._sizes), dtype=torch.float64).index_add(0, self._group, values)

    def _wide(self, preference: Tensor) -> Tensor:
        """The mask of the present widths; of every group the units that come first by preference (U,)."""
        order = torch.argsort(preference, descending=True, stable=True)
        order = order[torch.argsort(self._group[order], stable=True)]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order)) - (torch.cumsum(self._sizes, 0) - self._sizes)[self._group[order]]

        def mask(widths: Tensor) -> Tensor:
            return rank < widths[self._group]

        def fits(widths: Tensor) -> bool:
            return self.budget.cost(mask(widths)) <= self.budget.limit

        return mask(whole(self._log_widths.exp(), self._sizes, self.align, fits))

    def update(self, losses: Tensor) -> None:
        """Losses say nothing here: one network is not compared with another."""

    def best_guess(self) -> Tensor:
        return self._mask.clone()

    def candidates(self, n: int) -> Tensor:
        """(1, U): there is one network to settle on, whatever is asked for."""
        return self._mask[None].clone()

    def state_dict(self) -> dict[str, Any]:
        return {
            "log_widths": self._log_widths.clone(),
            "mask": self._mask.clone(),
            "sums": self._sums.to("cpu", copy=True),
            "count": float(self._count),
            "num_rounds": self.num_rounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := sorted({"log_widths", "mask", "sums", "count", "num_rounds"} - state.keys()):
            raise CheckpointError(f"`state` lacks {', '.join(missing)}; it is not an `EqualWorth` state")
        if state["mask"].shape != self._mask.shape:
            raise CheckpointError(f"`state` has {state['mask'].numel()} units and this network {self._mask.numel()}")
        self._log_widths, self._mask = state["log_widths"].clone(), state["mask"].clone()
        self.num_rounds = int(state["num_rounds"])
        # In place: a captured graph goes on with these tensors.
        self._sums.copy_(state["sums"])
        self._count.fill_(state["count"])

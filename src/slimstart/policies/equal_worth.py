r"""EqualWorth: as many units in every group as make one of them worth its cost, everywhere alike.

Think of a gate :math:`a_u = 1` that multiplies all that other layers read of unit u. Without the unit the loss would be
higher by about half of the curvature along its gate, and the curvature of a log-likelihood is the mean square of the
gradients of single examples. That of a batch is less by a factor, which is the same for all units but for what the mean
gradient adds; and only ratios count. So what a unit is worth comes with the backward of every ordinary step:

.. math:: v_u = \mathbb{E}\left[ (\partial L / \partial a_u)^2 \right].

Units that say the same make up for each other: near the output of a classifier of ten classes there is little more than
ten different things to say, however wide a group is. Where :math:`w_g` units say :math:`r_g` different things
(`participation`), we take a unit to be worth :math:`r_g / w_g` of that. With :math:`c_g` the cost of one more unit, the
widths are best where :math:`d_g = \bar v_g (r_g / w_g) / c_g` is the same for all groups: otherwise a unit less here
would pay for a better one there. So we follow

.. math:: x \leftarrow \mathrm{fit}\left( y \right), \qquad
    y_g = x_g + \mathrm{clip} (\eta \log d_g) - \eta p \sum_h A_{gh} (y_g - y_h), \qquad x_g = \log (w_g / w^0_g)

from equal shares :math:`w^0` of all groups, where `fit` moves all log-widths by one number such that the network fills
the budget, and `clip` to what one round may change keeps a few groups of extreme worth from taking everything at once.

The last term draws neighbours together, and is that of the new widths, so that they do not swing however strongly it
draws: :math:`A_{gh}` is the part of the cost of g that it shares with h. Almost every product of a network lies between
two groups, so twice the units here and half as many there cost the same; and a group as a whole is worth about the same
however wide it is, as long as a window of training lasts. So little says where to stop: of two neighbours one takes
all, and the blocks of a residual network waste away beside a wide stream. What all neighbours do together changes the
cost, and is free.

Where a group shrinks, the units that are worth least go; where it grows, units come that rested so far. The rate
:math:`\eta` falls to zero over some `rounds`, of a window of steps each; then the structure is settled by itself.

No second network is run, no mask is random, and at every step the network is exactly as large as the budget allows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.policies.budgets import BoundBudget, Budget
from slimstart.policies.fitting import Fit
from slimstart.policies.participation import participation
from slimstart.policies.ranking import places

logger = logging.getLogger(__name__)

ALIGN = 8
ROUNDS = 16
RATE = 0.5
PULL = 8.0
MOST = 0.35  # by which its worth may change a log-width in one round, before neighbours are drawn together
SEEN = 100  # gradients that are kept: the last of a window
FEWEST = 8  # of them that tell how many different things a group says; of fewer it is mostly noise


class EqualWorth:
    """A `WatchingPolicy` over widths; made on the CPU.

    Args:
        table: of a network whose channels have one unit each (coupling "stream").
        budget: `Channels`, `Params` or `Flops`.
        align: large groups have multiples of so many units, because GPUs are slow at others.
        rounds: draws until the structure is settled.
        rate: of the first round.
        pull: how strongly neighbours are drawn to one share.
    """

    num_masks = 1

    def __init__(
        self,
        table: CostTable,
        budget: Budget,
        *,
        align: int = ALIGN,
        rounds: int = ROUNDS,
        rate: float = RATE,
        pull: float = PULL,
    ) -> None:
        for name, value in (("align", align), ("rounds", rounds)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1")
        if not 0 < rate <= 1:
            raise ValueError(f"`rate` is {rate}; it must be in (0, 1]")
        if not 0 <= pull < math.inf:
            raise ValueError(f"`pull` is {pull}; it must be finite, and at least 0")
        self.budget: BoundBudget = budget.bind(table)
        self.align, self.rounds, self.rate, self.pull = align, rounds, rate, pull
        self._fit = Fit(self.budget, table)
        self._group, self._sizes = self._fit.group, self._fit.sizes
        self._equal_shares = self._log_widths = self._fit(self._sizes.double().log()[None])[0]
        self._neighbours = neighbours(self.budget, self._group, self._equal_shares.exp() / self._sizes)
        self.num_rounds, self._begun = 0, False
        self._held = torch.zeros(len(self._sizes), dtype=torch.bool)
        self._sums = torch.zeros(table.num_units, dtype=torch.float64)  # of squares, since the last draw
        self._count = torch.zeros((), dtype=torch.float64)
        self._seen = torch.zeros(SEEN, table.num_units)  # the last gradients, as on a ring
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

    def hold(self, units: Tensor) -> None:
        self._held = self._totals(units.double()) > 0

    def to(self, device: torch.device | str) -> None:
        self._sums, self._count, self._seen = (t.to(device) for t in (self._sums, self._count, self._seen))

    @torch.no_grad()
    def watch_(self, gradients: Tensor) -> None:
        gradients = gradients.detach().float()
        ok = torch.isfinite(gradients).all()  # of a bad step nothing is learned
        self._sums.add_(torch.where(ok, gradients.double().square(), 0))
        place = (self._count.long() % SEEN).view(1)
        self._seen.index_copy_(0, place, torch.where(ok, gradients, self._seen.index_select(0, place)[0])[None])
        self._count.add_(ok)

    def draw(self) -> Tensor:
        if self._begun and not self.is_done:
            if float(self._count):
                worth = (self._sums / self._count).cpu()
                self._learn(worth)
                self._mask = self._wide(torch.where(self._mask, worth, -1 - torch.arange(len(worth))))
            elif not bool(self._held.all()):  # then it is known from the start
                logger.warning(
                    "nothing was learned of widths since the last draw: no finite gradients were seen. Train `net` of "
                    "the SparseTraining, and step the optimizer before `update`"
                )
            self.num_rounds += 1
            self._sums.zero_()
            self._count.zero_()
        self._begun = True
        return self._mask[None].clone()

    def _learn(self, worth: Tensor) -> None:
        """Move the log-widths towards equal worth for equal cost."""
        present, each = self._mask.double(), self._mean_cost()
        widths = self._totals(present)
        mean = self._totals(worth * present) / widths * (self._num_different() / widths)
        known = (mean > 0) & ~self._held
        if not bool(known.any()):
            return
        drive = torch.where(known, (mean / each).log(), 0.0)
        # To the middle of what is spent, whatever a few groups that are worth nothing would like.
        drive = torch.where(known, drive - _median(drive[known], (each * widths)[known]), 0.0)
        rate = self.rate * (1 - self.num_rounds / self.rounds)
        self._log_widths = self._fit(self._moved(drive, rate, known)[None], ~known)[0]

    def _moved(self, drive: Tensor, rate: float, known: Tensor) -> Tensor:
        """Log-widths as worth drives them in one round, and as neighbours are drawn together."""
        return self._drawn_together(self._log_widths + (rate * drive).clamp(-MOST, MOST), rate, known)

    def _drawn_together(self, wanted: Tensor, rate: float, known: Tensor) -> Tensor:
        """Log-widths x from w with x = w - rate * pull * (how far x is from its neighbours): they do not swing.

        Groups that are not known stay where they are, and their neighbours are drawn to them.
        """
        apart = torch.diag(self._neighbours.sum(1)) - self._neighbours
        system = torch.eye(len(wanted)).double() + rate * self.pull * known.double()[:, None] * apart
        gone: Tensor = torch.linalg.solve(system, wanted - self._equal_shares)
        return self._equal_shares + gone

    def _num_different(self) -> Tensor:
        """(G,): how many different things the units of each group say."""
        seen, groups = self._seen[: int(self._count)].cpu().double(), range(len(self._sizes))
        if len(seen) < FEWEST:
            return self.widths.double()
        return torch.stack([participation(seen[:, self._mask & (self._group == g)]) for g in groups])

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
        return self._fit.whole_mask(self._log_widths.exp(), self.align, places(preference, self._group))

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
            "seen": self._seen[: int(self._count)].to("cpu", copy=True),
            "num_rounds": self.num_rounds,
            "begun": self._begun,
            "limit": self.budget.limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise CheckpointError(f"`state` lacks {', '.join(missing)}; it is of another policy, or another version")
        if state["mask"].shape != self._mask.shape:
            raise CheckpointError(f"`state` has {state['mask'].numel()} units and this network {self._mask.numel()}")
        if state["limit"] != self.budget.limit:
            raise CheckpointError(f"`state` has a budget of {state['limit']:g}, and this policy {self.budget.limit:g}")
        if len(state["seen"]) != min(SEEN, state["count"]):
            raise CheckpointError(f"`state` has {len(state['seen'])} gradients; it is of another version")
        self._log_widths, self._mask = state["log_widths"].clone(), state["mask"].clone()
        self.num_rounds, self._begun = int(state["num_rounds"]), bool(state["begun"])
        # In place: a captured graph goes on with these tensors.
        self._sums.copy_(state["sums"])
        self._seen[: len(state["seen"])].copy_(state["seen"])
        self._count.fill_(state["count"])


def neighbours(budget: BoundBudget, group: Tensor, shares: Tensor) -> Tensor:
    """(G, G): which part of what a group costs it shares with each other one; a row sums up to 1 at most.

    Args:
        group: (U,) of the units.
        shares: (G,) of the groups that are there.
    """

    def costs(shares: Tensor) -> Tensor:
        each = budget.gradient(shares[group])
        return torch.zeros_like(shares).index_add(0, group, each)

    # Costs are products of widths, so a difference is a derivative, but for a group with itself.
    alone, step = costs(shares), 0.1
    wider = [costs(shares * (1 + step * (torch.arange(len(shares)) == h))) for h in range(len(shares))]
    shared = ((torch.stack(wider, 1) - alone[:, None]) / step).fill_diagonal_(0).clamp(min=0)
    return shared / alone.clamp(min=1e-9 * budget.dense)[:, None]


def _median(values: Tensor, weights: Tensor) -> Tensor:
    """The value in the middle, by weight."""
    order = torch.argsort(values)
    below = torch.cumsum(weights[order], 0)
    return values[order[int((below < below[-1] / 2).sum())]]

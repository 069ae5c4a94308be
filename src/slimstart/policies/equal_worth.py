r"""EqualWorth: widths at which the importance of a unit, divided by its cost, is the same in all groups.

A gate :math:`a_u = 1` multiplies everything that other layers read from unit u. Without the unit the loss would be
higher by about half of the curvature along its gate, and the curvature of a log-likelihood is the mean square of the
gradients of single examples. The mean square of the gradients of batches is smaller by a factor. This factor is the
same for all units, except for the contribution of the mean gradient, and only ratios are used. So the backward pass of
every ordinary step gives the importance of a unit:

.. math:: v_u = \mathbb{E}\left[ (\partial L / \partial a_u)^2 \right].

Redundant units replace each other: near the output of a classifier with ten classes there are little more than ten
independent directions, however wide a group is. If the gradients of :math:`w_g` units have :math:`r_g` independent
directions (`participation`), the importance of a unit is multiplied by :math:`r_g / w_g`. With :math:`c_g` the cost of
one more unit, the widths are optimal if :math:`d_g = \bar v_g (r_g / w_g) / c_g` is the same for all groups: otherwise
the cost of a unit in one group would be better spent in another. So the update is

.. math:: x \leftarrow \mathrm{fit}\left( y \right), \qquad
    y_g = x_g + \mathrm{clip} (\eta \log d_g) - \eta p \sum_h A_{gh} (y_g - y_h), \qquad x_g = \log (w_g / w^0_g)

starting from the same fraction of all groups, :math:`w^0`. `fit` shifts all log-widths by a common number, such that
the network fills the budget. `clip` limits the change of one round, so that a few groups of extreme importance do not
take the whole budget at once.

The last term pulls neighbours together; :math:`A_{gh}` is the part of the cost of g that it shares with h. It is
implicit (in the new widths), so that widths do not oscillate however strong it is. It is needed because almost every
product of a network is between two groups: twice the units in one and half of them in the other cost the same, and
within a window of training the importance of a complete group hardly depends on its width. Without the pull, nothing
determines where to stop: one of two neighbours gets everything, and the blocks of a residual network vanish next to a
wide stream. A change that all neighbours have in common is not penalised.

Where a group shrinks, its least important units are dropped; where it grows, units from the store are added. The rate
:math:`\eta` decays to zero over a number of rounds, each a window of steps; then the structure is final.

There is no second network and no random mask, and at every step the network is as large as the budget allows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.policies.base import LearnsFrom, check_count, check_type
from slimstart.policies.budgets import BoundBudget, Budget, Params
from slimstart.policies.depth import GAMMA, layers_to_remove
from slimstart.policies.masks import places
from slimstart.policies.widths import ALIGN, Fit

logger = logging.getLogger(__name__)

SEARCHED = 0.2  # default length of the search, as a fraction of the training
WINDOW = 50  # steps of a round if the length of the training is not known
MOST = 0.35  # largest change of a log-width by importance in one round, before neighbours are pulled together
SEEN = 100  # number of gradients that are kept: the last ones of a window
FEWEST = 8  # smallest number of gradients from which redundancy is estimated; with fewer it is mostly noise
TRIES = 5  # networks that are measured at a structure update, at most
LEAST = 0.93  # part of a measured budget that is to be filled
RESUME = "resume with the policy, model, budget and version of slimstart with which it was saved"


@dataclass(frozen=True)
class EqualWorth:
    """Settings of the policy that learns widths from the gradients of ordinary steps.

    Args:
        rounds: largest number of structure updates; 0 keeps the widths of the start.
        rate: step size of the first round; it falls to zero over the search.
        pull: strength with which the fractions of neighbouring groups are pulled together.
        align: widths of large groups are multiples of this, because GPUs are slow at others.
        resample_every: number of steps of a round; by default such that `rounds` of them are the search, or 50 if its
            length is not known.
        search_steps: length of the search; by default a fifth of the training.
        depth: exponent of the rule that removes whole layers at the start (see `slimstart.policies.depth`): of the
            layers that can go, about a fraction `budget ** depth` remains. 0 keeps all.
        tilt: exponent by which layers are wider at the start where a weight costs little, as on small feature maps:
            fractions are proportional to `c ** -tilt`, with c the cost of one weight. 0 starts from equal fractions.

    Raises:
        ValueError: a setting is out of range.
    """

    rounds: int = 16
    rate: float = 0.5
    pull: float = 8.0
    align: int = ALIGN
    resample_every: int | None = None
    search_steps: int | None = None
    depth: float = GAMMA
    tilt: float = 0.15

    coupling: ClassVar[str] = "stream"
    learns_from: ClassVar[LearnsFrom] = "gradients"

    def __post_init__(self) -> None:
        check_count("rounds", self.rounds, least=0)
        check_count("align", self.align)
        check_count("resample_every", self.resample_every, optional=True)
        check_count("search_steps", self.search_steps, optional=True)
        if not 0 < self.rate <= 1:
            raise ValueError(f"`rate` is {self.rate}; it must be in (0, 1] (the default: 0.5)")
        if not 0 <= self.depth < math.inf:
            raise ValueError(f"`depth` is {self.depth}; it must be finite and at least 0, which keeps all layers")
        if not -1 <= self.tilt <= 1:
            raise ValueError(f"`tilt` is {self.tilt}; it must be in [-1, 1], and 0 means equal fractions")
        if not 0 <= self.pull < math.inf:
            raise ValueError(f"`pull` is {self.pull}; it must be finite and at least 0, which means no pull")

    def start(self, costs: CostTable, budget: Budget, total_steps: int | None = None) -> EqualWorthSearch:
        return EqualWorthSearch(self, costs, budget, total_steps)


class EqualWorthSearch:
    """Learner of `EqualWorth`, a `GradientLearner`; made on the CPU.

    Args:
        settings: the policy.
        costs: of a network whose channels have one unit each (coupling "stream").
        budget: `Channels`, `Params` or `Flops`, or several.
        total_steps: steps of the whole training, if known.

    Attributes:
        removed: positions in `costs.layers` of the layers that the network is without.
        rounds: number of structure updates of this search.
        num_rounds: number of structure updates so far.
    """

    num_masks = 1
    padding = None  # structure updates are few

    def __init__(self, settings: EqualWorth, costs: CostTable, budget: Budget, total_steps: int | None) -> None:
        steps: float | None = settings.search_steps
        if steps is None and total_steps is not None:
            steps = SEARCHED * total_steps
        if not settings.rounds:
            window = 1  # after which the structure is final
        elif steps is None:
            window = WINDOW
        else:
            window = max(1, round(steps / settings.rounds))
        self.window = window if settings.resample_every is None else settings.resample_every
        self.rounds = settings.rounds if steps is None else min(settings.rounds, max(1, round(steps / self.window)))
        self.settings, self.align = settings, settings.align
        self.removed = layers_to_remove(costs, budget, settings.depth, total_steps)
        costs = costs.without(self.removed)
        self.budget: BoundBudget = budget.bind(costs)
        self._fit = Fit(self.budget, costs)
        self._group, self._sizes = self._fit.group, self._fit.sizes
        profile = cost_of_a_weight(self.budget, costs, self._group) ** -settings.tilt if settings.tilt else None
        self._start = self._log_widths = self._fit.shares(profile)
        self._neighbours = neighbours(self.budget, self._group, self._start.exp() / self._sizes)
        self.num_rounds, self._begun = 0, False
        self._frozen = torch.zeros(len(self._sizes), dtype=torch.bool)
        # Sums of squared gradients since the last draw, and their number as the last entry: in one tensor, so that one
        # addition updates both, which an interrupt cannot split.
        self._observed = torch.zeros(costs.num_units + 1, dtype=torch.float64)
        self._seen = torch.zeros(SEEN, costs.num_units)  # the last gradients, as a ring buffer
        self._mask = self._wide(-torch.arange(costs.num_units).double())

    @property
    def is_done(self) -> bool:
        return self.num_rounds >= self.rounds

    @property
    def widths(self) -> Tensor:
        """(G,) int64: units of each group in the present network."""
        return torch.bincount(self._group[self._mask], minlength=len(self._sizes))

    @property
    def keep_probs(self) -> Tensor:
        """1 for units of the present network, 0 for the others."""
        return self._mask.double()

    @property
    def expected_cost(self) -> float:
        return self.budget.share(self.keep_probs)

    def freeze(self, units: Tensor) -> None:
        self._frozen = self._totals(units.double()) > 0

    def to(self, device: torch.device | str) -> None:
        self._observed, self._seen = self._observed.to(device), self._seen.to(device)

    @property
    def _sums(self) -> Tensor:
        return self._observed[:-1]

    @property
    def _count(self) -> Tensor:
        return self._observed[-1]

    @torch.no_grad()
    def observe_(self, gradients: Tensor) -> None:
        gradients = gradients.detach().float()
        ok = torch.isfinite(gradients).all()  # a step that is not finite is ignored, without a branch on the host
        place = (self._count.long() % SEEN).view(1)
        self._seen.index_copy_(0, place, torch.where(ok, gradients, self._seen.index_select(0, place)[0])[None])
        more = torch.cat([gradients.double().square(), torch.ones_like(self._observed[-1:])])
        self._observed.add_(torch.where(ok, more, 0))

    def draw(self) -> Tensor:
        if not self._begun:
            self._fill(-torch.arange(len(self._mask)).double(), torch.zeros_like(self._frozen))
        elif not self.is_done:
            if float(self._count):
                importance = (self._sums / self._count).cpu()
                self._learn(importance)
                # Units of the network by importance, then stored ones, whose importance is unknown, in their order.
                self._fill(torch.where(self._mask, importance, -1 - torch.arange(len(importance))), self._frozen)
            elif not bool(self._frozen.all()):  # otherwise a warning was given at the start
                logger.warning(
                    "a structure update is skipped: no finite gradients were observed since the last one. They are "
                    "observed inside `optimizer.step()`, from the `.grad` of the model's parameters: call `backward` "
                    "before it, and step with the optimizer that the SparseTraining was given"
                )
            self.num_rounds += 1
            self._observed.zero_()
        self._begun = True
        return self._mask[None].clone()

    def _learn(self, importance: Tensor) -> None:
        """Move the log-widths towards equal importance for equal cost."""
        present, each = self._mask.double(), self._mean_cost()
        widths = self._totals(present)
        mean = self._totals(importance * present) / widths * (self._num_different() / widths)
        known = (mean > 0) & ~self._frozen
        if not bool(known.any()):
            return
        drive = torch.where(known, (mean / each).log(), 0.0)
        # Relative to the median, weighted by cost, so that a few unimportant groups do not move all others.
        drive = torch.where(known, drive - _median(drive[known], (each * widths)[known]), 0.0)
        rate = self.settings.rate * (1 - self.num_rounds / self.rounds)
        self._log_widths = self._fit(self._moved(drive, rate, known), ~known)

    def _moved(self, drive: Tensor, rate: float, known: Tensor) -> Tensor:
        """Log-widths after one round: moved by importance, then pulled towards their neighbours."""
        return self._pulled(self._log_widths + (rate * drive).clamp(-MOST, MOST), rate, known)

    def _pulled(self, wanted: Tensor, rate: float, known: Tensor) -> Tensor:
        """Solve x = w - rate * pull * (distance of x from its neighbours) for log-widths x, with w the wanted ones.

        Distances are those of fractions, log (w / w^0). In matrix form (I + rate * pull * L) x = w, with L the graph
        Laplacian of the groups. Rows of groups whose importance is unknown are those of the identity: they keep their
        widths, and their neighbours are pulled towards them.
        """
        apart = torch.diag(self._neighbours.sum(1)) - self._neighbours
        system = torch.eye(len(wanted)).double() + rate * self.settings.pull * known.double()[:, None] * apart
        moved: Tensor = torch.linalg.solve(system, wanted - self._start)
        return self._start + moved

    def _num_different(self) -> Tensor:
        """(G,): number of independent directions of the gradients of each group."""
        seen, groups = self._seen[: int(self._count)].cpu().double(), range(len(self._sizes))
        if len(seen) < FEWEST:
            return self.widths.double()
        return torch.stack([participation(seen[:, self._mask & (self._group == g)]) for g in groups])

    def _mean_cost(self) -> Tensor:
        """(G,): mean cost of the absent units of each group, or of all its units if none is absent."""
        costs, absent = self.budget.gradient(self.keep_probs), (~self._mask).double()
        some = self._totals(absent)
        return torch.where(
            some > 0,
            self._totals(costs * absent) / some.clamp(min=1),
            self._totals(costs) / self._sizes,
        ).clamp(min=1e-9 * self.budget.dense)

    def _totals(self, values: Tensor) -> Tensor:
        return torch.zeros(len(self._sizes), dtype=torch.float64).index_add(0, self._group, values)

    def _fill(self, preference: Tensor, frozen: Tensor) -> None:
        """Take the mask of the present widths. A measured budget corrects them until it is filled, but not exceeded."""
        tried: list[tuple[float, float, Tensor, Tensor]] = []
        for _ in range(TRIES):
            mask = self._wide(preference)
            if tried and torch.equal(mask, tried[-1][-1]):
                break
            taken = self.budget.measured(mask, self.removed) or 1.0
            tried.append((max(taken, 1.0), -taken, self._log_widths, mask))
            if LEAST <= taken <= 1:
                break
            self._log_widths = self._fit(self._log_widths, frozen)
        excess, _, self._log_widths, self._mask = min(tried, key=lambda one: one[:2])
        if excess > 1:
            logger.warning("the network takes %.2f times its budget; no better widths were found", excess)

    def _wide(self, preference: Tensor) -> Tensor:
        """The mask of the present widths, with the units of every group that have the highest preference (U,)."""
        return self._fit.mask(self._log_widths, self.align, places(preference, self._group))

    def update(self, losses: Tensor) -> None:
        """Ignored: this policy learns from gradients."""

    def best_guess(self) -> Tensor:
        return self._mask.clone()

    def candidates(self, n: int) -> Tensor:
        """(1, U), for every n: there is one final network."""
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
            "limits": list(self.budget.limits),
            "removed": list(self.removed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise CheckpointError(f"`state` lacks {', '.join(missing)}; {RESUME}")
        if state["mask"].shape != self._mask.shape:
            num_units = state["mask"].numel()
            raise CheckpointError(f"`state` has {num_units} units and this network {self._mask.numel()}; {RESUME}")
        if state["limits"] != (limits := list(self.budget.limits)):
            raise CheckpointError(f"`state` has budgets of {state['limits']}, and this training {limits}; {RESUME}")
        if state["removed"] != list(self.removed):
            raise CheckpointError(
                f"`state` is without the layers {state['removed']}, and this network without {list(self.removed)}; "
                "give `EqualWorth` the same `depth`"
            )
        num_seen = min(SEEN, state["count"])
        if len(state["seen"]) != num_seen:
            raise CheckpointError(f"`state` has {len(state['seen'])} gradients, and must have {num_seen:g}; {RESUME}")
        seen = self._seen[: int(num_seen)]
        for name, like in (
            ("log_widths", self._log_widths), ("mask", self._mask), ("sums", self._sums), ("seen", seen),
        ):  # fmt: skip
            check_type(name, state[name], like.dtype)
            if state[name].shape != like.shape:
                shapes = f"{tuple(state[name].shape)}, and must have {tuple(like.shape)}"
                raise CheckpointError(f"`state` has {name} of shape {shapes}; {RESUME}")
        for name, kind in (("count", float), ("num_rounds", int), ("begun", bool)):
            check_type(name, state[name], kind)
        self._log_widths, self._mask = state["log_widths"].clone(), state["mask"].clone()
        self.num_rounds, self._begun = int(state["num_rounds"]), bool(state["begun"])
        # In place: captured CUDA graphs use these tensors.
        self._sums.copy_(state["sums"])
        self._seen[: len(state["seen"])].copy_(state["seen"])
        self._count.fill_(state["count"])


def participation(samples: Tensor) -> Tensor:
    r"""The participation ratio of gates: how many independent directions their gradients have.

    With :math:`F = \mathbb{E}[g g^\top]` for the gradients g of n gates,

    .. math:: r = (\mathrm{tr} F)^2 / \mathrm{tr} F^2, \qquad 1 \le r \le n,

    is n if all gates change the loss equally strongly and independently, and 1 if all change it in the same way. The
    traces, though not their ratio, are estimated without bias: that of the square from pairs of different samples,
    :math:`\mathrm{tr} F^2 = \mathbb{E}[(g \cdot g')^2]`.

    Args:
        samples: independent gradients (num_samples, n).

    Returns:
        r; n where the samples do not determine it, as with one sample.
    """
    num_samples, n = samples.shape
    products = samples @ samples.T
    own = products.diagonal().clone()
    of_pairs = products.fill_diagonal_(0).square().sum()
    ratio = own.mean().square() * (num_samples * (num_samples - 1)) / of_pairs
    return torch.where(of_pairs > 0, ratio, n).clamp(1, n)


def cost_of_a_weight(budget: BoundBudget, costs: CostTable, group: Tensor) -> Tensor:
    """(G,): the cost of each group in the unit of the budget, for each of its parameters.

    With a budget of FLOPs that is the number of positions at which they are applied; with one of parameters it is 1.
    """
    everything, totals = torch.ones(costs.num_units), torch.zeros(int(group.max()) + 1, dtype=torch.float64)
    cost, params = (totals.index_add(0, group, one.gradient(everything)) for one in (budget, Params(1.0).bind(costs)))
    return cost.clamp(min=1e-9 * budget.dense) / params.clamp(min=1)


def neighbours(budget: BoundBudget, group: Tensor, shares: Tensor) -> Tensor:
    """(G, G): the part of the cost of each group that it shares with each other group; rows sum to at most 1.

    Args:
        budget: with the costs.
        group: (U,) int64, the group of each unit.
        shares: (G,), the fraction of units of each group that are present.
    """

    budget = budget.tightest(shares[group])

    def costs(shares: Tensor) -> Tensor:
        each = budget.gradient(shares[group])
        return torch.zeros_like(shares).index_add(0, group, each)

    # Costs are products of the widths of two groups, linear in each, so a finite difference is the exact derivative; a
    # group with itself is the exception, and is not needed.
    alone, step = costs(shares), 0.1
    wider = [costs(shares * (1 + step * (torch.arange(len(shares)) == h))) for h in range(len(shares))]
    shared = ((torch.stack(wider, 1) - alone[:, None]) / step).fill_diagonal_(0).clamp(min=0)
    return shared / alone.clamp(min=1e-9 * budget.dense)[:, None]


def _median(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted median."""
    order = torch.argsort(values)
    below = torch.cumsum(weights[order], 0)
    return values[order[int((below < below[-1] / 2).sum())]]

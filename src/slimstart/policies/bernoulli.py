r"""BernoulliUnits, the paper's policy: one keep-probability per unit,

.. math:: s \leftarrow \mathrm{proj}_\mathcal{S}(s - \mathrm{Adam}(g)), \qquad
          g \approx H^\alpha(s) \nabla_s \mathbb{E}_{p(m|s)} L(m).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.policies.adam import Adam, AdamState
from slimstart.policies.budgets import BoundBudget, BoundChannels, Budget
from slimstart.policies.capping import SPREAD, TRIES, Cap
from slimstart.policies.cutting import cut, most_probable
from slimstart.policies.estimators import Estimator, get_estimator
from slimstart.policies.multisection import Multisection
from slimstart.policies.probabilities import sample, uniform_numbers
from slimstart.policies.projection import Direction, project, uniform_start

SAMPLINGS = ("bernoulli", "capped")
ALPHA, STRUCTURE_LR = 0.5, 12e-3  # the paper's


class BernoulliUnits:
    """The paper's policy: independent keep-probabilities, a policy gradient, Adam, and the projection on the budget.

    Where s reaches 0 or 1 its score is 0, and only Adam's momentum or the projection moves it again.

    It is a `DevicePolicy`, made on the CPU. There `update` projects to 1e-10 of the limit, in as many steps as it takes
    (`project`); on other devices, and in `learn_` everywhere, to about 1e-7 in a fixed number (`Multisection`).

    Args:
        table: the network's cost table.
        budget: `Channels`, `Params` or `Flops`.
        estimator: a name in `ESTIMATORS`, or an `Estimator`.
        alpha: exponent of the preconditioner, in [0, 1].
        lr: Adam's learning rate for s.
        total_steps: number of updates over which `lr` falls to 0 along a cosine; None keeps it constant.
        seed: of the masks.
        direction: see `project`.
        sampling: "bernoulli" (the paper), or "capped": a group that comes out much larger than expected is drawn again
            (`capping`); for estimators that compare losses.

    Attributes:
        spread: standard deviations above its mean that the number of kept units of a group hardly ever reaches.
    """

    def __init__(
        self,
        table: CostTable,
        budget: Budget,
        estimator: str | Estimator = "vr_pge",
        *,
        alpha: float = ALPHA,
        lr: float = STRUCTURE_LR,
        total_steps: int | None = None,
        seed: int = 0,
        direction: Direction = "uniform",
        sampling: str = "bernoulli",
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alpha` is {alpha}; it must be in [0, 1] (the paper: 1/2)")
        if not (lr > 0 and math.isfinite(lr)):
            raise ValueError(f"`lr` is {lr}; it must be positive and finite")
        if total_steps is not None and total_steps < 1:
            raise ValueError(f"`total_steps` is {total_steps}; it must be at least 1, or None for a constant `lr`")
        self.estimator = get_estimator(estimator)
        self.num_masks = self.estimator.num_masks
        if sampling not in SAMPLINGS:
            raise ValueError(f"`sampling` is {sampling!r}; it must be one of {', '.join(map(repr, SAMPLINGS))}")
        if sampling == "capped" and not self.estimator.centred:
            raise ValueError(
                f"`sampling` is 'capped', which biases {self.estimator.name!r}: it does not compare losses of several "
                "masks. Use 'bernoulli', or another estimator"
            )
        self.budget: BoundBudget = budget.bind(table)  # on the CPU, always
        self.alpha, self.lr, self.total_steps, self.direction = alpha, lr, total_steps, direction
        self._table = table
        self._generator = torch.Generator().manual_seed(seed)
        self._adam = Adam(lr, total_steps)
        self._multisection = Multisection(self.budget)
        # The start is feasible; projecting it refuses a wrong `direction` here and not at the first update.
        self._s = project(uniform_start(self.budget), self.budget, direction)
        self._moments = AdamState(
            torch.zeros_like(self._s), torch.zeros_like(self._s), torch.zeros((), dtype=torch.float64)
        )
        self._masks = torch.zeros(self.num_masks, table.num_units, dtype=torch.bool)
        self._cap = Cap(table.unit_group) if sampling == "capped" else None
        self.spread = SPREAD if sampling == "capped" else 4.0
        self._pending = False  # masks are drawn and not learned from
        self._ahead: tuple[Tensor, Tensor] | None = None  # numbers of the next draw, and the generator before them

    @property
    def keep_probs(self) -> Tensor:
        return self._s.to("cpu", copy=True)

    @property
    def num_updates(self) -> int:
        return int(self._moments.num_steps)

    @property
    def expected_cost(self) -> float:
        return float(self.budget.expected(self.keep_probs)) / self.budget.dense

    @property
    def capturable(self) -> bool:
        """An estimator that says so, direction "uniform" or a `Channels` budget, and something to learn."""
        alike = self.direction == "uniform" or isinstance(self.budget, BoundChannels)
        return alike and self.estimator.capturable and self.budget.num_units > 0

    def to(self, device: torch.device | str) -> None:
        self._s, self._masks = self._s.to(device), self._masks.to(device)
        self._moments = AdamState(*(tensor.to(device) for tensor in self._moments))
        self._adam, self._multisection = self._adam.to(device), self._multisection.to(device)
        self._cap = None if self._cap is None else self._cap.to(device)

    def draw(self) -> Tensor:
        return self.draw_with(self.random_numbers().to(self._s.device)).clone()

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        return (*(() if self._cap is None else (TRIES,)), *self._masks.shape)

    def prepare(self) -> None:
        if self._ahead is None:
            before = self._generator.get_state()
            self._ahead = self.random_numbers(), before

    def random_numbers(self) -> Tensor:
        if self._ahead is not None:
            (numbers, _), self._ahead = self._ahead, None
            return numbers
        *tries, num_units = self.numbers_shape
        return uniform_numbers(math.prod(tries), num_units, self._generator).view(self.numbers_shape)

    def _rewind(self) -> None:
        """Give back numbers that were prepared and not used."""
        if self._ahead is not None:
            self._generator.set_state(self._ahead[1])
            self._ahead = None

    def draw_with(self, numbers: Tensor) -> Tensor:
        if numbers.shape != self.numbers_shape:
            raise ValueError(
                f"`numbers` has shape {tuple(numbers.shape)}; it must be that of `random_numbers()`, "
                f"{self.numbers_shape}"
            )
        self._pending = True
        if self._cap is None:
            return torch.lt(numbers, self._s, out=self._masks)
        return self._masks.copy_(self._cap.first_within(numbers < self._s, self._s))

    def update(self, losses: Tensor) -> None:
        """Learn from the losses (num_masks,) of the last draw, once per draw.

        Raises:
            RuntimeError: there was no draw since the last update. Masks whose weights have been trained since give a
                biased gradient.
            ValueError: a loss is NaN or infinite, or there are too few or too many; nothing has changed then.
        """
        if not self._pending:
            raise RuntimeError("`update` needs masks that it has not used yet; call `draw` before it")
        self._check_losses(losses)
        losses = losses.detach().cpu().double()
        if not bool(torch.isfinite(losses).all()):
            raise ValueError(f"`losses` is {losses.tolist()}; all must be finite. Keep-probabilities are unchanged")
        device = self._s.device
        fixed = device.type != "cpu" and self.capturable
        self._learn_(
            losses.to(device),
            torch.ones((), dtype=torch.bool, device=device),
            self._multisection if fixed else lambda z, _: project(z, self.budget, self.direction).to(device),
        )

    def learn_(self, losses: Tensor, ok: Tensor) -> None:
        if not self.capturable:
            raise RuntimeError(
                f"`learn_` cannot do without the host for estimator {self.estimator.name!r} in direction "
                f"{self.direction!r}; ask `capturable` first, and call `update`"
            )
        self._check_losses(losses)
        self._learn_(losses, ok, self._multisection)

    @torch.no_grad()
    def _learn_(self, losses: Tensor, ok: Tensor, projection: Callable[[Tensor, Tensor], Tensor]) -> None:
        gradient = self.estimator.gradient(losses, self._masks, self._s, self.alpha)
        z, moments = self._adam.step(self._s, gradient, self._moments)
        s = projection(z, self._s)
        for old, new in zip((self._s, *self._moments), (s, *moments), strict=True):
            torch.where(ok, new, old, out=old)
        self._pending = False

    def _check_losses(self, losses: Tensor) -> None:
        if losses.shape != (self.num_masks,):
            raise ValueError(
                f"`losses` has shape {tuple(losses.shape)}; {self.estimator.name} needs ({self.num_masks},)"
            )

    def best_guess(self) -> Tensor:
        """The most probable of the masks that keep, in every group, the expected number of units; cut to the budget."""
        s = self.keep_probs
        return cut(most_probable(s, self._table.unit_group.cpu()), s, self._table, self.budget)

    def candidates(self, n: int) -> Tensor:
        """(n, U) drawn masks, each cut to the budget; takes random numbers from the policy's own generator."""
        if n < 1:
            raise ValueError(f"`n` is {n}; it must be at least 1")
        self._rewind()
        s = self.keep_probs
        masks = sample(s, n * (1 if self._cap is None else TRIES), self._generator)
        if self._cap is not None:
            masks = self._cap.to("cpu").first_within(masks.view(TRIES, n, -1), s)
        return torch.stack([cut(mask, s, self._table, self.budget) for mask in masks])

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, whatever the policy's device: a state of one device can be loaded on another."""
        self._rewind()
        exp_avg, exp_avg_sq = (moment.to("cpu", copy=True) for moment in self._moments[:2])
        return {
            "keep_probs": self.keep_probs,
            "num_updates": self.num_updates,
            "adam": {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
            "generator": self._generator.get_state(),
            "masks": self._masks.to("cpu", copy=True) if self._pending else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"keep_probs", "num_updates", "adam", "generator", "masks"} - state.keys())
        missing = missing or sorted({"exp_avg", "exp_avg_sq"} - state["adam"].keys())
        if missing:
            raise CheckpointError(f"`state` lacks {', '.join(missing)}; it is not a `BernoulliUnits` state")
        keep_probs, masks, adam = state["keep_probs"], state["masks"], state["adam"]
        for what, tensor in (("keep-probabilities", keep_probs), *adam.items()):
            if tensor.shape != self._s.shape:
                raise CheckpointError(f"`state` has {tensor.numel()} {what} and this network {self._s.numel()} units")
        if masks is not None and masks.shape != self._masks.shape:
            raise CheckpointError(
                f"`state` has masks of shape {tuple(masks.shape)}; {self.estimator.name} draws {self.num_masks}"
            )
        s = project(keep_probs, self.budget, self.direction)  # it may come from a search under a larger budget
        self._ahead = None
        self._generator.set_state(state["generator"].cpu())
        # In place: a captured graph goes on with these tensors.
        self._s.copy_(s)
        self._moments.exp_avg.copy_(adam["exp_avg"])
        self._moments.exp_avg_sq.copy_(adam["exp_avg_sq"])
        self._moments.num_steps.fill_(state["num_updates"])
        self._pending = masks is not None
        if masks is not None:
            self._masks.copy_(masks)

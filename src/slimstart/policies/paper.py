r"""The paper's policy (Algorithm 1): one keep-probability per unit,

.. math:: s \leftarrow \mathrm{proj}_\mathcal{S}(s - \mathrm{Adam}(g)), \qquad
          g \approx H^\alpha(s) \nabla_s \mathbb{E}_{p(m|s)} L(m).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.policies.adam import Adam, AdamState
from slimstart.policies.base import LearnsFrom, Padding, check_count, check_type
from slimstart.policies.budgets import BoundBudget, Budget
from slimstart.policies.estimators import Estimator, get_estimator
from slimstart.policies.masks import SPREAD, TRIES, Cap, cut, most_probable, sample, uniform_numbers
from slimstart.policies.projection import Multisection, project, uniform_start

SAMPLINGS = ("bernoulli", "capped")
UNCAPPED_SPREAD = 4.0  # spare capacity in standard deviations, which a width without a cap hardly ever exceeds


@dataclass(frozen=True)
class Paper:
    """Settings of the paper's policy; the defaults are the paper's, except for `sampling`.

    Args:
        estimator: estimator of the gradient of s: "vr_pge" (the paper), "pge", "vr_pge_symmetric", "leave_one_out", or
            an `Estimator`.
        alpha: exponent of the preconditioner H, in [0, 1].
        structure_lr: Adam's learning rate for s.
        sampling: "bernoulli" (the paper), or "capped": a group with many more units than expected is drawn again, so
            that networks need less spare capacity (`masks.py`). By default "capped" for estimators that compare losses,
            and "bernoulli" for others, for which "capped" would be biased.
        resample_every: number of steps for which a sub-network is kept. Only the first of them updates s: after it the
            weights have been trained for this mask, so its loss is not comparable with the reference's.
        align: the capacity of narrow layers is a multiple of this many units, so that shapes survive a draw. 1: exact
            widths. None: 8 in CUDA graphs, 1 otherwise.
        seed: seed of the generator that draws masks.
        search_steps: number of steps over which `structure_lr` decays to 0 along a cosine; by default those of the
            whole training. If neither is known, it is constant.

    Raises:
        ValueError: a setting is out of range.
    """

    estimator: str | Estimator = "vr_pge"
    alpha: float = 0.5
    structure_lr: float = 12e-3
    sampling: str | None = None
    resample_every: int = 1
    align: int | None = None
    seed: int = 0
    search_steps: int | None = None

    coupling: ClassVar[str] = "filter"
    learns_from: ClassVar[LearnsFrom] = "losses"

    def __post_init__(self) -> None:
        estimator = get_estimator(self.estimator)
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"`alpha` is {self.alpha}; it must be in [0, 1] (the paper: 1/2)")
        if not 0 < self.structure_lr < math.inf:
            raise ValueError(f"`structure_lr` is {self.structure_lr}; it must be positive and finite")
        if self.sampling not in (None, *SAMPLINGS):
            raise ValueError(f"`sampling` is {self.sampling!r}; it must be one of {', '.join(map(repr, SAMPLINGS))}")
        if self.sampling == "capped" and not estimator.centred:
            raise ValueError(
                f"`sampling` is 'capped', which biases {estimator.name!r}: it does not compare losses of several "
                "masks. Use 'bernoulli', or another estimator"
            )
        check_count("resample_every", self.resample_every)
        check_count("align", self.align, optional=True)
        check_count("search_steps", self.search_steps, optional=True)
        if not (isinstance(self.seed, Integral) and 0 <= int(self.seed) < 2**63):
            raise ValueError(f"`seed` is {self.seed!r}; it must be a whole number in [0, 2**63)")

    def start(self, costs: CostTable, budget: Budget, total_steps: int | None = None) -> PaperSearch:
        return PaperSearch(self, costs, budget, total_steps)


class PaperSearch:
    """Learner of `Paper`: independent keep-probabilities, a policy gradient, Adam, and the projection on the budget.

    Where s is 0 or 1 its score is 0, and only Adam's momentum or the projection changes it again.

    It is a `DeviceLearner`, made on the CPU. There `update` projects to within 1e-10 of the limit in as many iterations
    as needed (`project`); on other devices, and in `learn_` on all, to about 1e-7 in a fixed number (`Multisection`).
    """

    is_done = False

    def __init__(self, settings: Paper, costs: CostTable, budget: Budget, total_steps: int | None) -> None:
        search_steps = total_steps if settings.search_steps is None else settings.search_steps
        num_updates = None if search_steps is None else max(1, math.ceil(search_steps / settings.resample_every))
        self.estimator = get_estimator(settings.estimator)
        self.num_masks = self.estimator.num_masks
        capped = self.estimator.centred if settings.sampling is None else settings.sampling == "capped"
        self.window = settings.resample_every
        self.padding = Padding(settings.align, SPREAD if capped else UNCAPPED_SPREAD)
        self.budget: BoundBudget = budget.bind(costs)  # on the CPU, always
        self.settings, self._costs = settings, costs
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._adam = Adam(settings.structure_lr, num_updates)
        self._multisection = Multisection(self.budget)
        self._s = uniform_start(self.budget)
        self._moments = AdamState(
            torch.zeros_like(self._s), torch.zeros_like(self._s), torch.zeros((), dtype=torch.float64)
        )
        self._masks = torch.zeros(self.num_masks, costs.num_units, dtype=torch.bool)
        self._cap = Cap(costs.unit_group) if capped else None
        self._pending = False  # whether `update` may be called for the masks
        # Random numbers of the next draw if they were generated in advance, and the state of the generator before.
        self._ahead: tuple[Tensor, Tensor] | None = None

    @property
    def keep_probs(self) -> Tensor:
        return self._s.to("cpu", copy=True)

    @property
    def num_updates(self) -> int:
        return int(self._moments.num_steps)

    @property
    def expected_cost(self) -> float:
        return self.budget.share(self.keep_probs)

    @property
    def capturable(self) -> bool:
        return self.estimator.capturable and self.budget.num_units > 0

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
        """Discard random numbers that were generated in advance, and restore the generator."""
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
            RuntimeError: there was no draw since the last update. With weights that were trained for one of the masks
                since, the gradient would be biased.
            ValueError: a loss is NaN or infinite, or their number is wrong; nothing is changed then.
        """
        if not self._pending:
            raise RuntimeError("`update` needs a new draw; call `draw` before it")
        self._check_losses(losses)
        losses = losses.detach().cpu().double()
        if not bool(torch.isfinite(losses).all()):
            raise ValueError(
                f"`losses` is {losses.tolist()}; all must be finite. Keep-probabilities are unchanged; draw again to "
                "continue"
            )
        device = self._s.device
        fixed = device.type != "cpu" and self.capturable
        self._learn_(
            losses.to(device),
            torch.ones((), dtype=torch.bool, device=device),
            self._multisection if fixed else lambda z, _: project(z, self.budget).to(device),
        )

    def learn_(self, losses: Tensor, ok: Tensor) -> None:
        if not self.capturable:
            raise RuntimeError(
                f"`learn_` needs an estimator without operations on the host, which {self.estimator.name!r} is not; "
                "where `capturable` is false, call `update`"
            )
        self._check_losses(losses)
        self._learn_(losses, ok, self._multisection)

    @torch.no_grad()
    def _learn_(self, losses: Tensor, ok: Tensor, projection: Callable[[Tensor, Tensor], Tensor]) -> None:
        gradient = self.estimator.gradient(losses, self._masks, self._s, self.settings.alpha)
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
        """The most probable mask that keeps the expected number of units of every group, cut to the budget."""
        s = self.keep_probs
        return cut(most_probable(s, self._costs.unit_group.cpu()), s, self._costs, self.budget)

    def candidates(self, n: int) -> Tensor:
        """(n, U) drawn masks, each cut to the budget; takes random numbers from the learner's generator."""
        if n < 1:
            raise ValueError(f"`n` is {n}; it must be at least 1")
        self._rewind()
        s = self.keep_probs
        masks = sample(s, n * (1 if self._cap is None else TRIES), self._generator)
        if self._cap is not None:
            masks = self._cap.to("cpu").first_within(masks.view(TRIES, n, -1), s)
        return torch.stack([cut(mask, s, self._costs, self.budget) for mask in masks])

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, so that a state of one device can be loaded on another."""
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
            raise CheckpointError(f"`state` lacks {', '.join(missing)}; it is not a state of the paper's policy")
        keep_probs, masks, adam = state["keep_probs"], state["masks"], state["adam"]
        for what, tensor in (("keep-probabilities", keep_probs), *adam.items()):
            if tensor.shape != self._s.shape:
                raise CheckpointError(f"`state` has {tensor.numel()} {what} and this network {self._s.numel()} units")
        if masks is not None and masks.shape != self._masks.shape:
            raise CheckpointError(
                f"`state` has masks of shape {tuple(masks.shape)}; {self.estimator.name} draws {self.num_masks}"
            )
        for what, tensor in (("keep_probs", keep_probs), *adam.items()):
            check_type(what, tensor, torch.float64)
        if masks is not None:
            check_type("masks", masks, torch.bool)
        check_type("num_updates", state["num_updates"], int)
        s = project(keep_probs, self.budget)  # the state may be that of a search with a larger budget
        self._ahead = None
        self._generator.set_state(state["generator"].cpu())
        # In place: captured CUDA graphs use these tensors.
        self._s.copy_(s)
        self._moments.exp_avg.copy_(adam["exp_avg"])
        self._moments.exp_avg_sq.copy_(adam["exp_avg_sq"])
        self._moments.num_steps.fill_(state["num_updates"])
        self._pending = masks is not None
        if masks is not None:
            self._masks.copy_(masks)

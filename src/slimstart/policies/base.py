"""The contract between a training and a policy: `Policy` has the settings, `Learner` the running state.

A policy declares what it needs: a coupling, and losses or gradients to learn from. `start` returns a learner, which
draws masks within the budget and learns. Neither knows the network: masks are flat tensors and losses are numbers. A
policy of your own has the same rights as `Paper` and `EqualWorth`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.policies.budgets import Budget

LearnsFrom = Literal["losses", "gradients"]


class Policy(Protocol):
    """Settings of a policy. They do not change, so that one object can be used in several trainings."""

    @property
    def coupling(self) -> str:
        """The coupling ("filter" or "stream") of a training, unless the user chooses another one."""

    @property
    def learns_from(self) -> LearnsFrom:
        """What to learn from: "losses" of the masks of a draw, or "gradients" of every step (a `GradientLearner`)."""

    def start(self, costs: CostTable, budget: Budget, total_steps: int | None) -> Learner:
        """The learner of one training.

        Args:
            costs: cost table of the network.
            budget: `Channels`, `Params` or `Flops`, or several (`JointBudget`).
            total_steps: number of steps of the whole training; None if it is not known.

        Raises:
            BudgetError: no sub-network is within the budget.
        """


@dataclass(frozen=True)
class Padding:
    """Spare capacity of narrow layers, filled with channels that stay zero, so that shapes survive a draw.

    Attributes:
        align: capacity is a multiple of this; 1 for exact widths. None: 8 in CUDA graphs, 1 otherwise.
        spread: capacity in standard deviations above the expected number of kept units of a group.
    """

    align: int | None
    spread: float


class Learner(Protocol):
    """Running state of a policy: draw masks, learn, propose a final mask, save and restore."""

    @property
    def window(self) -> int:
        """Number of steps between two draws."""

    @property
    def padding(self) -> Padding | None:
        """Spare capacity for the next draws; None for exact widths, which are better where draws are rare."""

    @property
    def num_masks(self) -> int:
        """Number of masks per draw, and of losses per update. The first mask is trained, the others are references."""

    @property
    def keep_probs(self) -> Tensor:
        """(U,) float64 on the CPU; a copy."""

    @property
    def expected_cost(self) -> float:
        """Expected cost in the unit of the budget, as a fraction of the dense network's (`BoundBudget.share`)."""

    @property
    def is_done(self) -> bool:
        """Whether the last draw is the final structure. False for a learner that never ends by itself."""

    def draw(self) -> Tensor:
        """(num_masks, U) raw masks; `update` refers to those of the last draw."""

    def update(self, losses: Tensor) -> None:
        """Learn from the losses (num_masks,) of the last draw, once per draw."""

    def best_guess(self) -> Tensor:
        """One mask (U,) within the budget that represents the present state; changes nothing."""

    def candidates(self, n: int) -> Tensor:
        """(n, U) masks to choose the final one from, each within the budget; (1, U) if there is only one."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only: safe for `torch.load(weights_only=True)`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the learner then continues bit-exactly."""


@runtime_checkable
class DeviceLearner(Learner, Protocol):
    """A learner whose state is on one device, with the operations of a captured step: `learn_`, then `draw_with`."""

    @property
    def capturable(self) -> bool:
        """Whether `draw_with` and `learn_` run without the host, with the present settings."""

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        """The shape of `random_numbers()`."""

    def to(self, device: torch.device | str) -> None:
        """Move all state to a device."""

    def prepare(self) -> None:
        """Generate the random numbers of the next draw in advance; their values do not depend on it."""

    def random_numbers(self) -> Tensor:
        """Numbers for `draw_with`, from the learner's generator: on the CPU, the same for all devices."""

    def draw_with(self, numbers: Tensor) -> Tensor:
        """(num_masks, U) raw masks from `random_numbers` on the learner's device; always the same tensor."""

    def learn_(self, losses: Tensor, ok: Tensor) -> None:
        """Learn from the losses (num_masks,) of the last draw, in place; change nothing where `ok` is false.

        Both are on the learner's device. `ok` is a bool scalar, and must be false where a loss is not finite.
        """


@runtime_checkable
class GradientLearner(Learner, Protocol):
    """A learner that observes, in every step of the optimizer, the gradient of the loss for each unit."""

    def freeze(self, units: Tensor) -> None:
        """Keep the widths of the groups of some units, because not all of their gradients are known.

        Called before the first draw, and again, with more units, when a layer is frozen during training.

        Args:
            units: (U,) bool.
        """

    def to(self, device: torch.device | str) -> None:
        """Move the state that `observe_` changes to a device."""

    def observe_(self, gradients: Tensor) -> None:
        """Record the gradients of one step, in place, without reading a value on the host.

        Args:
            gradients: (U,), of the loss with respect to a gate of 1 at every unit; 0 for absent units.
        """


def removed_layers(learner: Learner) -> tuple[int, ...]:
    """Positions in `costs.layers` of the layers that the present network is without.

    A learner that learns from gradients may have them as `removed`; one without that attribute keeps all layers.
    """
    return tuple(getattr(learner, "removed", ()))


def check_count(name: str, value: object, *, optional: bool = False, least: int = 1) -> None:
    """Raise a ValueError for a setting that is not a whole number of at least `least`.

    Args:
        optional: whether None is allowed.
    """
    if not (value is None and optional) and not (isinstance(value, Integral) and int(value) >= least):
        raise ValueError(f"`{name}` is {value!r}; it must be a whole number, at least {least}{', or None' * optional}")


def check_type(name: str, value: object, wanted: torch.dtype | type) -> None:
    """Check the type of an entry of a state dict.

    Args:
        wanted: for a tensor, its dtype.

    Raises:
        CheckpointError: the entry has another type.
    """
    seen = value.dtype if isinstance(value, Tensor) else type(value)
    if seen != wanted:
        raise CheckpointError(f"`state` has {name} of type {seen}; it must be {wanted}")

r"""Policies: what is learned about the structure, behind one small protocol.

A policy draws masks, learns from their losses, and keeps to the budget. It knows no network: masks are flat, losses are
numbers. `slimstart.policies.BernoulliUnits` is the paper's. A `DevicePolicy` can do its part of a step on a GPU
without asking the host, so that a CUDA graph can hold it; an engine asks `isinstance` and `capturable` first. A
`WatchingPolicy` compares no losses: it learns from the gradients of every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


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


@runtime_checkable
class DevicePolicy(Policy, Protocol):
    """A policy whose state is on one device, with the verbs of a captured step: `learn_`, then `draw_with`."""

    @property
    def capturable(self) -> bool:
        """Whether `draw_with` and `learn_` do without the host, as this policy is configured."""

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        """The shape of `random_numbers()`."""

    def to(self, device: torch.device | str) -> None:
        """Move everything there; nothing happens where it is there already."""

    def prepare(self) -> None:
        """Make the random numbers of the next draw already, while there is time; they are the same as without."""

    def random_numbers(self) -> Tensor:
        """Of `numbers_shape`, for `draw_with`, from the policy's generator: on the CPU, the same for all devices."""

    def draw_with(self, numbers: Tensor) -> Tensor:
        """(num_masks, U) raw masks from `random_numbers` on the policy's device; always the same tensor, rewritten."""

    def learn_(self, losses: Tensor, ok: Tensor) -> None:
        """Learn from the losses (num_masks,) of the last draw, in place; change nothing where `ok` is false.

        Both are on the policy's device. `ok` is a bool scalar, and must be false where a loss is not finite.
        """


@runtime_checkable
class WatchingPolicy(Policy, Protocol):
    """A policy that is told, before every step of the optimizer, how the loss changes with each unit."""

    @property
    def is_done(self) -> bool:
        """Whether the last draw has settled the structure."""

    def hold(self, units: Tensor) -> None:
        """Of these units (U,) bool too little will be known: their groups stay as they are; before the first draw."""

    def to(self, device: torch.device | str) -> None:
        """Move what `watch_` changes there."""

    def watch_(self, gradients: Tensor) -> None:
        """Take note of one step, on the device, in place, without asking for a value.

        Args:
            gradients: (U,), of the loss with respect to a gate of 1 at every unit; 0 for absent units.
        """

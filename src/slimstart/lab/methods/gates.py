"""Gates: a structure that is learned by the chain rule, on a dense network (`gated_network.Gated`).

A relaxation defines the gates as a function of the learned s, and the gradient of s. Everything else is here: hooks for
the gradient, steps that change nothing after a failure, costs, and proposed masks.
A step of the network is a step of the gates: `begin_step` on the host, `forward` and its backward, the optimizer's
step, `learn_`. The last three have a fixed number of operations and ask for no value, so a CUDA graph can hold them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.costs import CostTable
from slimstart.policies import Budget, Flops, sample
from slimstart.policies.adam import Adam, AdamState
from slimstart.policies.masks import cut, most_probable


class Gates(nn.Module, ABC):
    """One gate per unit. All that the next step depends on are buffers (and the generator of `candidates`).

    Random numbers of gates are of torch's own generator of their device, which a CUDA graph advances.

    Args:
        s: learned parameters, float64, on the device of the gates.
        table: the network's cost table.
        budget: budget of the finished network.
        lr: the learning rate of s.
        total_steps: number of steps of the search.
        seed: seed of `candidates`.

    Attributes:
        default_lr: the relaxation's own `lr`.
        gradient: gradient of the loss with respect to s, from the last backward.
    """

    default_lr: float
    s: Tensor
    gradient: Tensor

    def __init__(self, s: Tensor, table: CostTable, budget: Budget, lr: float, total_steps: int, seed: int) -> None:
        super().__init__()
        if not (lr > 0 and math.isfinite(lr)):
            raise ValueError(f"`lr` is {lr}; it must be positive and finite")
        if total_steps < 1:
            raise ValueError(f"`total_steps` is {total_steps}; it must be at least 1")
        self.lr, self.total_steps = lr, total_steps
        self.budget, self._flops = budget.bind(table), Flops(1.0).bind(table)  # on the CPU
        self._table = table
        self._generator = torch.Generator().manual_seed(seed)
        self.register_buffer("s", s)
        self.register_buffer("gradient", torch.zeros_like(s), persistent=False)

    @abstractmethod
    def gates(self, s: Tensor) -> Tensor:
        """(U,) gates, with a gradient for s."""

    @abstractmethod
    def updates(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Buffers, and what they become by `gradient`, of the same type; nothing is changed."""

    def forward(self) -> Tensor:
        """(U,) float32 gates, whose backward writes `gradient`."""
        s = self.s.detach()
        if torch.is_grad_enabled():
            s.requires_grad_().register_hook(self._note)
        return self.gates(s).float()

    def _note(self, gradient: Tensor) -> None:
        self.gradient.copy_(gradient)  # in place of what another backward, such as one for planning, has left

    @torch.no_grad()
    def learn_(self, ok: Tensor) -> None:
        """Learn from `gradient`, in place; change nothing where it is not finite, or where `ok` is false.

        Args:
            ok: bool scalar on the gates' device.
        """
        ok = ok & torch.isfinite(self.gradient).all()
        for old, new in list(self.updates()):
            torch.where(ok, new, old, out=old)

    def begin_step(self, progress: float) -> None:
        """Prepare a step, on the host.

        Args:
            progress: the part of all steps that is done, in [0, 1].
        """

    def begin_epoch(self, epoch: int) -> None:
        """Prepare an epoch, on the host; they count from 0."""

    @property
    @abstractmethod
    def keep_probs(self) -> Tensor:
        """(U,) float64 on the CPU: the probability that each unit is kept; a copy."""

    @property
    def expected_cost(self) -> float:
        """The expected cost in the unit of the budget, as a fraction of the dense network."""
        return self.budget.share(self.keep_probs)

    @property
    def forward_flops(self) -> int:
        """FLOPs of one forward as the method counts it: of the dense network."""
        return int(self._flops.dense)

    def best_guess(self) -> Tensor:
        """The most probable mask of the expected widths; cut to the budget."""
        s = self.keep_probs
        return cut(most_probable(s, self._table.unit_group.cpu()), s, self._table, self.budget)

    def candidates(self, n: int) -> Tensor:
        """(n, U) drawn masks, each cut to the budget."""
        s = self.keep_probs
        return torch.stack([cut(mask, s, self._table, self.budget) for mask in sample(s, n, self._generator)])

    def values(self) -> Tensor:
        """(U,) float32: the gates of kept units, for `fold_`."""
        return torch.ones(self.budget.num_units, device=self.s.device)

    def get_extra_state(self) -> Tensor:
        return self._generator.get_state()

    def set_extra_state(self, state: Any) -> None:
        self._generator.set_state(state.cpu())


class AdamGates(Gates):
    """Gates whose s is learned by Adam; its learning rate falls to 0 along a cosine."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: Tensor

    def __init__(self, s: Tensor, table: CostTable, budget: Budget, lr: float, total_steps: int, seed: int) -> None:
        super().__init__(s, table, budget, lr, total_steps, seed)
        self._adam = Adam(lr, total_steps).to(s.device)
        self.register_buffer("exp_avg", torch.zeros_like(s))
        self.register_buffer("exp_avg_sq", torch.zeros_like(s))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.float64, device=s.device))

    @abstractmethod
    def follow(self, z: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Buffers, and what they become, where Adam leads to z; s among them."""

    def updates(self) -> Iterable[tuple[Tensor, Tensor]]:
        moments = AdamState(self.exp_avg, self.exp_avg_sq, self.num_steps)
        z, after = self._adam.step(self.s, self.gradient, moments)
        return [*self.follow(z), *zip(moments, after, strict=True)]


def straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    """The value, bit for bit, with the gradient of a surrogate."""
    return value + (surrogate - surrogate.detach())

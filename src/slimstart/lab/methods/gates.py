"""Gates: a structure that is learned by the chain rule, on a dense network (`gated_network.Gated`).

A relaxation defines the gates as a function of the learned s, and the gradient of s. Everything else is here: hooks for
the gradient, steps that change nothing after a failure, costs, and proposed masks.
A step of the network is a step of the gates: `begin_step` on the host, `forward` and its backward, the optimizer's
step, `learn_`. The last three have a fixed number of operations and ask for no value, so a CUDA graph can hold them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.devices import device_of
from slimstart.graph import ChannelGraph
from slimstart.policies import Budget, Flops, sample
from slimstart.policies.adam import Adam, AdamState
from slimstart.policies.masks import cut, most_probable


class Gates(nn.Module, ABC):
    """One gate per unit. All that the next step depends on are buffers (and the generator of `candidates`).

    Random numbers of gates are of torch's own generator of their device, which a CUDA graph advances.

    Args:
        model: dense model, whose device is that of the gates.
        graph: channel graph of the model, with coupling "stream".
        budget: budget of the finished network.
        lr: learning rate of s; None for the relaxation's own, `default_lr`.
        total_steps: number of steps of the search.
        seed: seed of `candidates`.

    Attributes:
        s: learned parameters, float64.
        gradient: gradient of the loss with respect to s, from the last backward.
    """

    default_lr: float
    s: Tensor
    gradient: Tensor

    def __init__(
        self, model: nn.Module, graph: ChannelGraph, budget: Budget, lr: float | None, total_steps: int, seed: int
    ) -> None:
        super().__init__()
        self.lr, self.total_steps = self.default_lr if lr is None else lr, total_steps
        self._table = graph.costs
        self.budget, self._flops = budget.bind(self._table), Flops(1.0).bind(self._table)  # on the CPU
        self._generator = torch.Generator().manual_seed(seed)
        s = self.start(model, graph).to(device_of(model))
        self.register_buffer("s", s)
        self.register_buffer("gradient", torch.zeros_like(s), persistent=False)

    @abstractmethod
    def start(self, model: nn.Module, graph: ChannelGraph) -> Tensor:
        """The first s; called once, after the budget is bound."""

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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._adam = Adam(self.lr, self.total_steps).to(self.s.device)
        self.register_buffer("exp_avg", torch.zeros_like(self.s))
        self.register_buffer("exp_avg_sq", torch.zeros_like(self.s))
        self.register_buffer("num_steps", self.s.new_zeros(()))

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

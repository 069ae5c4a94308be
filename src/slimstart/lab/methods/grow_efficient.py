r"""Growing efficient networks by structured continuous sparsification (Yuan, Savarese and Maire, ICLR 2021).

Every unit has a logit s, and a draw :math:`q \sim \mathrm{Bernoulli}(\sigma(\beta s))` for each epoch:

.. math:: g = \sigma(\beta s) \, q, \qquad L + \lambda \sum_u \sigma(\beta_u s_u), \qquad
          \lambda = \lambda_0 \, (c(q) / c^* - 1), \qquad \beta_u = \beta_1^{\,t_u / T},

with c(q) the cost of the draw and c* the budget's: the penalty prunes a network that is too large and grows one that is
too small. :math:`t_u` of all T steps are those in which the unit was drawn, so a logit hardens only while it is in use.
The gradient is that of q = 1, also where q = 0: the forward is as narrow as the draw, the backward is dense, and
`forward_flops` counts so. Nothing is projected: the final network may be above or below the budget, and its mask is
that of the method, :math:`s > 0`, the limit of the draw as beta grows.

The authors' program was not available. Choices that the paper's text leaves open are marked as ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph
from slimstart.lab.methods.gates import Gates, straight_through
from slimstart.policies import uniform_start
from slimstart.policies.masks import most_probable

# SGD for s as for the weights, without decay, and the last beta: as in Continuous Sparsification, by the same authors,
# whose relaxation this is.
LR, MOMENTUM, LAST_BETA = 0.1, 0.9, 200.0
# The paper's schedule of 160 epochs: a tenth from 80 on, and from 120 on.
DROPS, DROP = (80 / 160, 120 / 160), 0.1
# Ours: the scale of the penalty (a logit or so per epoch of 200 steps, at twice the budget); the part of the widths
# within the budget that the seed network has; and the least.
PENALTY, SEED_WIDTH, LEAST_WIDTH = 0.02, 0.5, 1e-3


class GrowEfficientGates(Gates):
    """Gates that `begin_epoch` draws; before the first epoch, the most probable ones."""

    default_lr = LR

    q: Tensor
    active: Tensor
    momentum: Tensor
    num_steps: Tensor
    penalty: Tensor
    sparse_flops: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        s = self.s
        self.register_buffer("q", most_probable(self._widths, self._table.unit_group.cpu()).to(s.device))
        self.register_buffer("active", torch.zeros_like(s))
        self.register_buffer("momentum", torch.zeros_like(s))
        self.register_buffer("num_steps", s.new_zeros(()))
        self.register_buffer("penalty", s.new_zeros(()))
        self._drops = s.new_tensor(DROPS) * self.total_steps
        self.register_buffer("sparse_flops", torch.zeros((), dtype=torch.int64))  # the host asks for it every step
        self._measure()

    def start(self, model: nn.Module, graph: ChannelGraph) -> Tensor:
        self._widths = SEED_WIDTH * uniform_start(self.budget)
        return torch.logit(self._widths, LEAST_WIDTH)

    def _open(self, s: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * s)

    @property
    def beta(self) -> Tensor:
        """(U,), from 1 to `LAST_BETA`."""
        return torch.pow(LAST_BETA, self.active / self.total_steps)

    def begin_epoch(self, epoch: int) -> None:
        """Draw the sub-network of this epoch, and set the penalty by its cost."""
        self.q.copy_(self._table.at_least_one(torch.rand_like(self.s) < self._open(self.s)))
        self._measure()

    def _measure(self) -> None:
        mask = self.q.cpu()
        self.penalty.fill_(PENALTY * (self.budget.cost(mask) / self.budget.limit - 1))
        self.sparse_flops.fill_(self._flops.cost(mask))

    def gates(self, s: Tensor) -> Tensor:
        opened = self._open(s)
        return straight_through(opened.detach() * self.q, opened)

    def updates(self) -> Iterable[tuple[Tensor, Tensor]]:
        opened = self._open(self.s)
        gradient = self.gradient + self.penalty * self.beta * opened * (1 - opened)
        momentum = MOMENTUM * self.momentum + gradient
        num_drops = (self.num_steps >= self._drops).double().sum()
        return [
            (self.s, self.s - self.lr * torch.pow(DROP, num_drops) * momentum),
            (self.momentum, momentum),
            (self.active, self.active + self.q),
            (self.num_steps, self.num_steps + 1),
        ]

    @property
    def keep_probs(self) -> Tensor:
        return self._open(self.s).to("cpu", copy=True)

    @property
    def forward_flops(self) -> int:
        """FLOPs of one forward of the epoch's sub-network; a backward is as for the dense one."""
        return int(self.sparse_flops)

    def best_guess(self) -> Tensor:
        """The units of positive logit, and at least one of every group, without regard to the budget."""
        return self._table.at_least_one(self.s.cpu() > 0)

    def candidates(self, n: int) -> Tensor:
        """`best_guess`, n times: the final mask is not random."""
        return self.best_guess().expand(n, -1).clone()

    def values(self) -> Tensor:
        return self._open(self.s).float()

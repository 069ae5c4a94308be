r"""Adam in tensor operations only, with the number of steps on the device, so that a CUDA graph can hold it.

.. math:: a \leftarrow \beta_1 a + (1 - \beta_1) g, \qquad b \leftarrow \beta_2 b + (1 - \beta_2) g^2, \qquad
          z = s - \eta \, \frac{a / (1 - \beta_1^t)}{\sqrt{b / (1 - \beta_2^t)} + \epsilon}
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slimstart.devices import Movable

BETAS = (0.9, 0.999)
EPSILON = 1e-8


class AdamState(NamedTuple):
    """The state of Adam: its two moments (U,), and t as a float64 scalar."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: Tensor


class Adam(Movable):
    """Adam's formula, with PyTorch's defaults; the caller has the state.

    Args:
        lr: the learning rate.
        total_steps: number of steps over which `lr` decays to 0 along a cosine; None keeps it constant.
    """

    def __init__(self, lr: float, total_steps: int | None) -> None:
        self._lr, self._total_steps = lr, total_steps
        self._betas = torch.tensor(BETAS, dtype=torch.float64)

    def step(self, s: Tensor, gradient: Tensor, state: AdamState) -> tuple[Tensor, AdamState]:
        """z and the next state; the arguments are not changed."""
        num_steps = state.num_steps + 1
        first, second = 1 - torch.pow(self._betas, num_steps)
        exp_avg = state.exp_avg.lerp(gradient, 1 - BETAS[0])
        exp_avg_sq = (BETAS[1] * state.exp_avg_sq).addcmul_(gradient, gradient, value=1 - BETAS[1])
        size = exp_avg_sq.div(second).sqrt_().add_(EPSILON)
        z = torch.addcdiv(s, exp_avg * (self._rate(state.num_steps) / first), size, value=-1)
        return z, AdamState(exp_avg, exp_avg_sq, num_steps)

    def _rate(self, num_steps: Tensor) -> Tensor | float:
        if self._total_steps is None:
            return self._lr
        angle = (num_steps * (math.pi / self._total_steps)).clamp_(max=math.pi)
        return angle.cos_().add_(1).mul_(self._lr / 2)

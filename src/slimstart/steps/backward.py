"""Behind the forwards: gradients, clipping and the optimizer's step, the same for eager and captured steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from slimstart.steps.optimizers import complete


@dataclass(frozen=True)
class Backward:
    """From a loss to new weights.

    Attributes:
        optimizer: of the network that is trained.
        max_grad_norm: the norm of all gradients together is clipped at this, if given.
        scaler: of the loss, for float16, if given and enabled. A step with infinite gradients is skipped by it.
        also: what learns from the same backward beside the weights, if anything; called behind the optimizer's step
            with a bool scalar on the device, false where nothing may change.
    """

    optimizer: Optimizer
    max_grad_norm: float | None = None
    scaler: GradScaler | None = None
    also: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.scaler is not None and not self.scaler.is_enabled():
            object.__setattr__(self, "scaler", None)

    def gradients(self, loss: Tensor) -> None:
        """Fill the gradients, in place of what they were."""
        self.optimizer.zero_grad(set_to_none=True)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, ok: Tensor) -> None:
        """Clip, and let the optimizer make its step.

        Args:
            ok: whether the loss is finite; for `also`.
        """
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.also is not None:
            self.also(ok)

    def __call__(self, loss: Tensor) -> None:
        self.gradients(loss)
        complete(self.optimizer)  # a parameter may have been thawed
        self.step(torch.isfinite(loss.detach()))

"""After the forwards: gradients, clipping and the optimizers' step, the same for eager and captured steps."""

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
        optimizers: of the network that is trained.
        max_grad_norm: the norm of all gradients together is clipped at this, if given.
        scaler: of the loss, for float16, if given and enabled. A step with infinite gradients is skipped by it.
        also: what learns from the same backward beside the weights, if anything; called after the optimizers' step with
            a bool scalar on the device, false where nothing may change.
    """

    optimizers: tuple[Optimizer, ...]
    max_grad_norm: float | None = None
    scaler: GradScaler | None = None
    also: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.scaler is not None and not self.scaler.is_enabled():
            object.__setattr__(self, "scaler", None)

    def gradients(self, loss: Tensor) -> None:
        """Fill the gradients, in place of what they were."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, ok: Tensor) -> None:
        """Clip, and let the optimizers make their step.

        Args:
            ok: whether the loss is finite; for `also`.
        """
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            parameters = [
                p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
            ]
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if self.also is not None:
            self.also(ok)

    def __call__(self, loss: Tensor) -> None:
        self.gradients(loss)
        for optimizer in self.optimizers:
            complete(optimizer)  # a parameter may have been thawed
        self.step(torch.isfinite(loss.detach()))

    def break_off(self) -> None:
        """After a step that failed in the middle: a scaler would take the next one for the rest of it."""
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler._per_optimizer_states.pop(id(optimizer), None)

    @property
    def optimizer(self) -> Optimizer:
        """The one optimizer of captured steps."""
        (only,) = self.optimizers
        return only

"""One eager step: the forward, the forwards of references, the check of the losses, the backward and the update.

Captured steps are made of the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from slimstart.devices import cuda_devices
from slimstart.distributed.process_group import ProcessGroup, reporting
from slimstart.errors import NonFiniteLossError
from slimstart.narrow.optimizer_state import parameters_of
from slimstart.steps.depthwise_mode import AllWidths
from slimstart.steps.optimizers import complete_momentum

if TYPE_CHECKING:
    from slimstart.steps.graphs import Steps

LossFunction = Callable[..., Any]
"""Called as `loss_fn(net, *batch)`; returns the loss, or (loss, anything)."""


NOTHING = object()
"""Marks a loss function that returns only the loss."""


class Stepping:
    """Base of a training whose steps may be captured."""

    num_steps: int
    num_examples: float  # in the last step, over all processes
    _backward: Backward
    _steps: Steps | None
    _eager: str | None  # reason for which there are no captured steps
    _unchanged: str  # subject and verb of what a loss that is not finite leaves unchanged, for the message

    @property
    def reason(self) -> str | None:
        """The reason for eager steps, or, with captured steps, for the last eager one; None if it was captured."""
        return self._eager if self._steps is None else self._steps.reason

    @property
    def engine(self) -> str:
        """The engine of the last step: "graphs", or "eager", also where a step could not be captured."""
        return "graphs" if self.reason is None else "eager"

    @property
    def _kernels(self) -> AbstractContextManager[object]:
        """Context for eager forwards with the kernels of captured steps, so that no further ones are compiled."""
        return nullcontext() if self._steps is None else AllWidths()

    def _check(self, wait: bool = False) -> None:
        """Raise if a captured step has met a loss that is not finite; with `wait`, the last step is included."""
        if self._steps is not None:
            if wait:
                torch.cuda.synchronize()
            if self._steps.failed:
                self.num_steps -= self._steps.reset()
                check_finite(self.num_steps, math.nan, unchanged=self._unchanged)

    def _run_eagerly(
        self,
        loss_fn: LossFunction,
        network: nn.Module,
        batch: Sequence[Any],
        process_group: ProcessGroup,
        references: Iterable[nn.Module] = (),
        statistics: Sequence[Tensor] | None = None,
    ) -> tuple[Any, Sequence[Tensor]]:
        """Train a network on a batch, of which `num_examples` are this process's.

        Args:
            references: networks that see the same batch, one after the other, without gradients.
            statistics: buffers that are restored if a loss, or the norm of the gradients where they are clipped, is not
                finite; None for no check.

        Returns:
            The result of the loss function, detached, and the losses of all networks, averaged over processes.
        """
        check: Callable[..., None] | None = None
        if statistics is not None:
            weights = network.parameters()
            check = partial(check_finite, self.num_steps, unchanged=self._unchanged, weights=weights)
        before = [buffer.clone() for buffer in statistics or ()]
        try:
            with reporting():
                with self._kernels:
                    loss, more = loss_of(loss_fn(network, *batch))
                    reference_losses = [forward_only(loss_fn, net, batch) for net in references]
                found = process_group.average_step(network, [loss, *reference_losses], self.num_examples)
                if check is not None:  # before the backward, so that a loss that is not finite changes no weight
                    check(*found.losses)
            with reporting():
                # Data parallel training averages gradients over processes; a process with more examples counts more.
                self._backward(
                    loss if found.weight == 1 else found.weight * loss,
                    None if check is None else partial(check, names=("norm of the gradients",)),
                )
        except NonFiniteLossError:
            for buffer, value in zip(statistics or (), before, strict=True):
                buffer.copy_(value)
            raise
        self.num_examples = found.num_examples
        return as_returned(found.losses[0].detach(), more), found.losses


def loss_of(result: Any) -> tuple[Tensor, Any]:
    """The loss, and the other result of a loss function, or `NOTHING`; a tensor with one element is a scalar."""
    loss, more = result if isinstance(result, tuple) and len(result) == 2 else (result, NOTHING)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        described = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(f"`loss_fn` returned {described}; it must return a scalar tensor, or (scalar tensor, anything)")
    return loss.reshape(()), more


def as_returned(loss: Tensor, more: Any, copy: bool = False) -> Any:
    """The result of a step, in the form in which the loss function returned it, without an autograd graph."""
    if more is NOTHING:
        return loss
    return loss, tree_map_only(Tensor, lambda t: t.detach().clone() if copy else t.detach(), more)


def forward_only(loss_fn: LossFunction, net: nn.Module, batch: Sequence[Any]) -> Tensor:
    """The loss of a network without gradients; the global random generators are restored afterwards."""
    with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices(net)):
        return loss_of(loss_fn(net, *batch))[0]


def check_finite(
    step: int,
    *losses: Tensor | float,
    unchanged: str,
    weights: Iterable[Tensor] = (),
    names: Sequence[str] = ("loss", "reference loss"),
) -> None:
    """Refuse a loss (the first) or a reference loss (the others) that is NaN or infinite.

    Args:
        unchanged: subject and verb of what has not been updated, for the message.
        weights: weights of the network; the message says if they are not finite.
        names: names of the first number and of the others.

    Raises:
        NonFiniteLossError: a loss is NaN or infinite.
    """
    for which, loss in zip((names[0], *[names[-1]] * len(losses)), losses, strict=False):
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        if not math.isfinite(value):
            if any(not bool(torch.isfinite(weight).all()) for weight in weights):
                raise NonFiniteLossError(
                    f"the {which} is {value} at step {step}, because weights are not finite since an earlier step. Go "
                    "back to a checkpoint, and lower the learning rate or clip gradients (`max_grad_norm`)"
                )
            raise NonFiniteLossError(
                f"the {which} is {value} at step {step}; {unchanged} as before. "
                "Lower the learning rate, clip gradients, or go back to a checkpoint"
            )


@dataclass(frozen=True)
class Backward:
    """From a loss to new weights: backward, clipping and the optimizers' steps.

    Attributes:
        max_grad_norm: maximum norm of all gradients together; None for no clipping.
        scaler: gradient scaler for float16, which skips a step with infinite gradients.
        also: further update from the same gradients, called after the optimizers' steps with a bool scalar on the
            device; where that is false, it must change nothing.
    """

    optimizers: tuple[Optimizer, ...]
    max_grad_norm: float | None = None
    scaler: GradScaler | None = None
    also: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.scaler is not None and not self.scaler.is_enabled():
            object.__setattr__(self, "scaler", None)

    def __call__(self, loss: Tensor, check_norm: Callable[[Tensor], None] | None = None) -> None:
        """Update the weights, unless `check_norm` refuses the norm of the gradients, where they are clipped."""
        self.gradients(loss)
        for optimizer in self.optimizers:
            complete_momentum(optimizer)  # a parameter may have been unfrozen
        self.step(torch.isfinite(loss.detach()), check_norm)

    def gradients(self, loss: Tensor) -> None:
        """Replace the gradients by those of a loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, ok: Tensor, check_norm: Callable[[Tensor], None] | None = None) -> None:
        """Clip the gradients and let the optimizers step.

        Args:
            ok: whether the loss is finite; for `also`.
            check_norm: called before any optimizer steps; not with a scaler, which skips such steps itself.
        """
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters_of(*self.optimizers), self.max_grad_norm)
            if check_norm is not None and self.scaler is None:
                check_norm(norm)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if self.also is not None:
            self.also(ok)

    def reset_scaler(self) -> None:
        """After a step that failed halfway: otherwise the scaler takes the next step for the rest of it."""
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler._per_optimizer_states.pop(id(optimizer), None)

    @property
    def optimizer(self) -> Optimizer:
        """The one optimizer of captured steps."""
        (only,) = self.optimizers
        return only

"""Running a loss function eagerly: forwards that leave no trace, and steps that fail without leaving one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slimstart.devices import cuda_devices
from slimstart.errors import NonFiniteLossError

LossFunction = Callable[..., Any]
"""Called as `loss_fn(net, *batch)`; returns the loss, or (loss, anything)."""


NOTHING = object()
"""In place of what a loss function may return with the loss."""


def loss_of(result: Any) -> tuple[Tensor, Any]:
    """The loss, and whatever else a loss function has returned, or `NOTHING`.

    Raises:
        TypeError: it has returned no scalar tensor.
    """
    loss, more = result if isinstance(result, tuple) and len(result) == 2 else (result, NOTHING)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        described = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(f"`loss_fn` returned {described}; it must return a scalar tensor, or (scalar tensor, anything)")
    return loss, more


def detached(more: Any, copy: bool = False) -> Any:
    """What a loss function has returned beside the loss, without its graph."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone() if copy else tensor.detach(), more)


def forward_without_trace(loss_fn: LossFunction, net: nn.Module, batch: Sequence[Any]) -> Tensor:
    """The loss of a network, without gradient, and with the random numbers of the main forward left alone."""
    with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices(net)):
        return loss_of(loss_fn(net, *batch))[0]


def check_finite(step: int, *losses: Tensor | float, unchanged: str) -> None:
    """Refuse a loss (the first) or a reference loss (the others) that is NaN or infinite.

    Args:
        step: for the message.
        unchanged: for the message too: what has not been updated.
    """
    for which, loss in zip(("loss", *["reference loss"] * len(losses)), losses, strict=False):
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        if not math.isfinite(value):
            raise not_finite(which, value, step, unchanged)


def not_finite(which: str, value: float, step: int, unchanged: str) -> NonFiniteLossError:
    """The error to raise; its arguments are those of `check_finite`."""
    return NonFiniteLossError(
        f"the {which} is {value} at step {step}; {unchanged} as before. "
        "Lower the learning rate, clip gradients, or go back to a checkpoint"
    )


@contextmanager
def undoing_statistics(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Put normalisation statistics back if a loss turns out not to be finite."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    except NonFiniteLossError:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        raise

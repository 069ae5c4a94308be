"""What an optimizer needs to be captured: the learning rate in a tensor, and a way to skip a bad step on the device.

PyTorch's fused optimizers have both. Others are run eagerly between graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

FUSED = (SGD, Adam, AdamW)


def fuse(optimizer: Optimizer, device: torch.device | None = None) -> bool:
    """Make an optimizer use its fused kernels, if it has some; returns whether its step can be captured.

    Args:
        device: where its parameters will be, if not where they are.
    """
    if type(optimizer) not in FUSED:
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = device or parameters[0].device
    if device.type != "cuda" or not all(p.is_floating_point() for p in parameters):
        return False
    if len({p.device for p in parameters}) > 1:
        return False
    if any(group.get("differentiable") or group.get("maximize") for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            group["capturable"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as its constructor would say
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):  # which lies on the CPU until the fused kernels need it
            state["step"] = state["step"].to(device, torch.float32)
    return True


def has_begun(optimizer: Optimizer) -> bool:
    """Whether the optimizer has made its state, which must not happen while a step is captured."""
    return all(
        any(isinstance(value, Tensor) for p in group["params"] for value in optimizer.state.get(p, {}).values())
        for group in optimizer.param_groups
        if group.get("momentum", 1) != 0  # SGD without momentum has none
    )


def complete(optimizer: Optimizer) -> None:
    """Give SGD the momentum that some parameters lack: its fused kernels want it of all with a gradient, or of none.

    Zeros are what the first step of such a parameter would begin with, where nothing is dampened.
    """
    if type(optimizer) is not SGD:
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            trained = [p for p in group["params"] if p.grad is not None]
            lacking = [p for p in trained if optimizer.state[p].get("momentum_buffer") is None]
            if len(lacking) < len(trained):
                for parameter in lacking:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def unfuse(optimizer: Optimizer) -> None:
    """Take back what only a GPU understands: settings that came with a state dict from one."""
    for group in optimizer.param_groups:
        if group.get("capturable") and not all(p.is_cuda for p in group["params"]):
            group["capturable"] = False


class CapturedRates:
    """Learning rates as tensors that a graph reads, kept equal to those in the optimizer's groups."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._rates: list[Tensor] = []
        self._values: list[float] = []

    def follow(self) -> None:
        """Take over what a scheduler has set since."""
        for _ in self._optimizer.param_groups[len(self._rates) :]:
            self._rates.append(torch.zeros((), device=self._device))
            self._values.append(math.nan)
        for number, (group, rate) in enumerate(zip(self._optimizer.param_groups, self._rates, strict=True)):
            value = group["lr"]
            if isinstance(value, Tensor):
                rate.copy_(value)
                self._values[number] = math.nan
            elif value != self._values[number]:
                rate.fill_(value)
                self._values[number] = value

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """The tensors stand in for the numbers, while a step is captured."""
        self.follow()
        groups = self._optimizer.param_groups
        values = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(groups, values, strict=True):
                group["lr"] = value


def settings(optimizer: Optimizer) -> tuple[Any, ...]:
    """All hyper-parameters but the learning rate: a graph holds them as constants."""
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in ("params", "lr", "initial_lr") and not isinstance(value, Tensor)
    )

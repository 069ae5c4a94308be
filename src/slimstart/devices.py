"""Devices and training modes of modules, and the memory that is left on a device.

Some modules do more in `train()` than set a flag: they clear what they cached in evaluation mode, or keep a part of
themselves frozen. So a mode is never set by the attribute.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device:
    """The device of a model, which must be on one device."""
    return next(model.parameters()).device


def cuda_devices(module: nn.Module) -> list[int]:
    """Indices of the CUDA devices of the module's parameters, for `torch.random.fork_rng`."""
    return sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})


@contextmanager
def seeded(module: nn.Module) -> Iterator[None]:
    """Context with random numbers that are always the same, on the CPU and on the devices of a module.

    `torch.manual_seed` would also seed other devices, whose states are not restored.
    """
    devices = cuda_devices(module)
    with torch.random.fork_rng(devices=devices):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
            generator.manual_seed(0)
        yield


def free_on_device(device: torch.device | None = None) -> int:
    """Bytes that PyTorch can allocate now, within `torch.cuda.set_per_process_memory_fraction`."""
    free, total = torch.cuda.mem_get_info(device)
    share = round(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), share) - torch.cuda.memory_allocated(device)


class Movable:
    """Base of objects whose attributes are tensors, other `Movable` objects and plain values.

    Attributes:
        device: the device of the tensors; they are made on the CPU.
    """

    device = torch.device("cpu")

    def to(self, device: torch.device | str) -> Self:
        """A copy of this object on a device; tensors that are there already are shared."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Movable):
                setattr(moved, name, value.to(device))
        moved.device = torch.device(device)
        return moved


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Set modules to training or evaluation mode; parents are listed before their children."""
    for module, training in modes:
        if module.training is not training:  # setting a mode is far slower than reading it
            module.train(training)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode within this context, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Compute no gradients within this context.

    Unlike `torch.no_grad` alone, it also covers views of parameters (a class token that is expanded): those still say
    that they require gradients, but have none, and PyTorch's `FlopCounterMode` fails on them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)

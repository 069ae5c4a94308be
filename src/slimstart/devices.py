"""Devices of modules and tensors, and the memory that is left on them."""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device:
    """The device of a model, which must be on one device."""
    return next(model.parameters()).device


def cuda_devices(module: nn.Module) -> list[int]:
    """Indices of the CUDA devices of the module's parameters, for `torch.random.fork_rng`."""
    return sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})


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

"""Where a module lives."""

from __future__ import annotations

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device of a model that is on one."""
    return next(model.parameters()).device


def cuda_devices(module: nn.Module) -> list[int]:
    """Indices of the CUDA devices that hold the module's parameters, as `torch.random.fork_rng` wants them.

    For whoever has to leave their random numbers alone.
    """
    return sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})

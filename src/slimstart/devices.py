"""Which GPUs a module lives on, for whoever has to leave their random numbers alone."""

from __future__ import annotations

from torch import nn


def cuda_devices(module: nn.Module) -> list[int]:
    """Indices of the CUDA devices that hold the module's parameters, as `torch.random.fork_rng` wants them."""
    return sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})

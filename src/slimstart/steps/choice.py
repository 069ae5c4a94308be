"""Which engine runs the steps."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from slimstart.kernels import use_triton
from slimstart.steps.optimizers import fuse

ENGINES = ("auto", "eager", "graphs")


def choose(engine: str, optimizer: Optimizer, device: torch.device) -> tuple[str, str | None]:
    """("eager" or "graphs", why eager): what a user asked for, as far as it is possible here.

    Raises:
        ValueError: there is no such engine, or "graphs" was asked for and cannot be.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` is {engine!r}; it must be one of {', '.join(map(repr, ENGINES))}")
    if engine == "eager":
        return "eager", "it was asked for"
    reason = None
    if device.type != "cuda":
        reason = f"the model is on {device.type}, and CUDA graphs need a GPU"
    elif device.index not in (None, torch.cuda.current_device()):
        reason = f"the model is on {device}, which is not the current device; call torch.cuda.set_device before"
    elif not use_triton(torch.empty(0, device=device)):
        reason = "Triton, which builds the kernels for it, does not work here"
    elif not fuse(optimizer, device):
        reason = f"{type(optimizer).__name__} has no fused step that a graph could hold (SGD, Adam and AdamW have)"
    if reason is None:
        return "graphs", None
    if engine == "graphs":
        raise ValueError(f"`engine` is 'graphs', but {reason}")
    return "eager", reason

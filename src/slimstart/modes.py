"""Training modes of modules, changed as users change them.

Some modules do more in `train()` than set a flag: they clear what they cached in evaluation mode, or keep a part of
themselves frozen. So a mode is never set by the attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


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

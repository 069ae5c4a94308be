"""The scale of newly initialised weights, which depends on the fan-in in PyTorch's and most other initialisations.

A narrow network whose weights are taken from a newly initialised dense one has weights for a larger fan-in. Multiplied
by the square root of the ratio of both, they have the scale of a narrow network that was initialised by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.graph import Selection
from slimstart.graph.readers import LAYERS
from slimstart.narrow.compact import compact


def sign_of_training(model: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    """Why a model seems to have been trained, in words; empty for one that seems new.

    Norms are new with the same weight for all channels. Batch norms may be initialised at random, and have a counter.
    """
    if any(optimizer.state for optimizer in optimizers):
        return "the optimizer has state"
    for name, module in model.named_modules():
        tensors = dict((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
        if any(tensor.is_meta for tensor in tensors.values()):
            continue
        if (count := tensors.get("num_batches_tracked")) is not None:
            if bool(count > 0):
                return f"the batch norm `{name}` has counted batches"
        elif "norm" in type(module).__name__.lower():
            affine = (tensors[own] for own in ("weight", "bias") if own in tensors and tensors[own].dim() == 1)
            if any(bool((tensor != tensor[:1]).any()) for tensor in affine):
                return f"the weights of the norm `{name}` differ"
    return ""


@torch.no_grad()
def suit_(model: nn.Module, selection: Selection) -> None:
    """Give the weights of a newly initialised dense model the scale for a selection; frozen ones are not changed."""
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        layer = modules[name.rpartition(".")[0]]
        if weight.requires_grad and weight.dim() > 1 and name in selection.graph.tensors and isinstance(layer, LAYERS):
            narrow = selection.shape(name, weight.shape)
            weight.mul_((weight.shape[1:].numel() / narrow[1:].numel()) ** 0.5)


def compact_fresh(model: nn.Module, selection: Selection) -> nn.Module:
    """A newly initialised narrow network from a newly initialised dense one, which is not changed."""
    model = copy.deepcopy(model)
    suit_(model, selection)
    return compact(model, selection)

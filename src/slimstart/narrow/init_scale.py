"""The scale of newly initialised weights, which depends on the fan-in in PyTorch's and most other initialisations.

A narrow network whose weights are taken from a newly initialised dense one has weights for a larger fan-in. Multiplied
by the square root of the ratio of both, they have the scale of a narrow network that was initialised by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from slimstart.graph import Selection
from slimstart.graph.readers import LAYERS
from slimstart.narrow.compact import compact

AFFINE = {"weight", "bias"}
_NEW_STATISTICS = {"num_batches_tracked": 0, "running_mean": 0, "running_var": 1}


def sign_of_training(model: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    """Why a model seems to have been trained, in words; empty for one that seems new.

    Norms are new with the same weight for all channels. Batch norms may be initialised at random; of these, the running
    statistics are looked at.
    """
    if any(optimizer.state for optimizer in optimizers):
        return "the optimizer has state"
    for name, module in model.named_modules():
        tensors = dict((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
        if any(tensor.is_meta for tensor in tensors.values()):
            continue
        if isinstance(module, _BatchNorm):
            if any(own in tensors and bool((tensors[own] != new).any()) for own, new in _NEW_STATISTICS.items()):
                return f"the batch norm `{name}` has statistics"
        elif _is_norm(module) and any(bool((one != one[:1]).any()) for own, one in tensors.items() if own in AFFINE):
            return f"the weights of the norm `{name}` differ"
    return ""


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.dim() == 1


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

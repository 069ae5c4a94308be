"""The scale of newly initialised weights, which depends on the fan-in in PyTorch's and most other initialisations.

A narrow network whose weights are taken from a newly initialised dense one has weights for a larger fan-in. Multiplied
by the square root of the ratio of both, they have the scale of a narrow network that was initialised by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.graph import Selection
from slimstart.graph.readers import LAYERS
from slimstart.narrow.compact import compact


@torch.no_grad()
def rescale_fan_in_(weights: Mapping[str, Tensor], model: nn.Module, selection: Selection) -> None:
    """Give weights the scale of an initialisation at the fan-in that they have under a selection, in place.

    Args:
        weights: weights by name, narrow or dense; only those of convolutions and linear layers are changed.
        model: the dense model.
        selection: selection of the narrow network.
    """
    modules = dict(model.named_modules())
    for name, dense in model.named_parameters():
        layer = modules[name.rpartition(".")[0]]
        if name in weights and dense.dim() > 1 and name in selection.graph.tensors and isinstance(layer, LAYERS):
            narrow = selection.shape(name, dense.shape)
            weights[name].mul_((dense.shape[1:].numel() / narrow[1:].numel()) ** 0.5)


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


def suit_(model: nn.Module, selection: Selection) -> None:
    """Give the weights of a newly initialised dense model the scale for a selection; frozen ones are not changed."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rescale_fan_in_(trained, model, selection)


def compact_fresh(model: nn.Module, selection: Selection) -> nn.Module:
    """A newly initialised narrow network from a newly initialised dense one."""
    small = compact(model, selection)
    rescale_fan_in_(dict(small.named_parameters()), model, selection)
    return small

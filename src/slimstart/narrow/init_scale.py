"""The scale of fresh weights: initialisations, PyTorch's own among them, go by how many inputs a weight sums.

A narrow network that is cut out of a freshly initialised dense one has weights for more inputs than it has. Scaled up
by the square root of what they have lost, they are as if it had been initialised by itself.
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
        weights: by name, narrow or dense; only convolutions and linear layers among them are changed.
        model: the dense model.
    """
    modules = dict(model.named_modules())
    for name, dense in model.named_parameters():
        layer = modules[name.rpartition(".")[0]]
        if name in weights and dense.dim() > 1 and name in selection.graph.tensors and isinstance(layer, LAYERS):
            narrow = selection.shape(name, dense.shape)
            weights[name].mul_((dense.shape[1:].numel() / narrow[1:].numel()) ** 0.5)


def is_pretrained(model: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Whether there are signs that a model has been trained: optimizer state, or batches that a norm has counted."""
    counts = (buffer for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked"))
    return any(bool(optimizer.state) for optimizer in optimizers) or any(
        bool(count > 0) for count in counts if not count.is_meta
    )


def suit_(model: nn.Module, selection: Selection) -> None:
    """Give a new dense model the scale that its weights will need under a selection; frozen ones are left alone."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rescale_fan_in_(trained, model, selection)


def compact_fresh(model: nn.Module, selection: Selection) -> nn.Module:
    """A freshly initialised narrow network from a freshly initialised dense one."""
    small = compact(model, selection)
    rescale_fan_in_(dict(small.named_parameters()), model, selection)
    return small

"""The scale of fresh weights: initialisations, PyTorch's own among them, go by how many inputs a weight sums.

A narrow network that is cut out of a freshly initialised dense one has weights for more inputs than it has. Scaled up
by the square root of what they have lost, they are as if it had been initialised by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slimstart.graph import Selection
from slimstart.graph.readers import LAYERS
from slimstart.subnet.compact import compact


@torch.no_grad()
def rescale_fan_in_(weights: Mapping[str, Tensor], model: nn.Module, selection: Selection) -> None:
    """Give weights the scale of an initialisation at the fan-in that they have under a selection, in place.

    Args:
        weights: by name, narrow or dense; only those of convolutions and linear layers are changed.
        model: the dense model.
    """
    modules = dict(model.named_modules())
    for name, dense in model.named_parameters():
        layer = modules[name.rpartition(".")[0]]
        if dense.dim() > 1 and name in selection.graph.tensors and isinstance(layer, LAYERS):
            narrow = selection.shape(name, dense.shape)
            weights[name].mul_((dense.shape[1:].numel() / narrow[1:].numel()) ** 0.5)


def compact_fresh(model: nn.Module, selection: Selection) -> nn.Module:
    """A freshly initialised narrow network from a freshly initialised dense one."""
    small = compact(model, selection)
    rescale_fan_in_(dict(small.named_parameters()), model, selection)
    return small

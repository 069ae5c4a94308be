"""Beginning: the fresh weights of a model, kept until it is known which of them a training will need.

A network that is searched for while it trains has units of many ages in the end, and optimizer state to match. Where
the search is short, it costs little to begin anew in the network that was found, and that trains as if it had been
there from the start: with the same weights, at the scale that its own initialisation would have given them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph
from slimstart.subnet.compact import tensor_names
from slimstart.subnet.fan_in import rescale_fan_in_


class Beginning:
    """True as long as there is something to begin with.

    Args:
        model: dense.
        fresh: it has just been initialised; otherwise there is nothing to keep.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph, fresh: bool) -> None:
        self._model, self._graph = model, graph
        kept = tensor_names(model) if fresh else {}
        self.tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in kept.items()}

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def suit_(self, mask: Tensor) -> None:
        """Give the model's weights the scale of fresh ones in the network of a mask; those that are frozen are not."""
        trained = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        rescale_fan_in_(trained, self._model, self._graph.select(mask))

    @torch.no_grad()
    def return_(self, mask: Tensor) -> None:
        """Make the model what it was, for the network of a mask."""
        for name, tensor in tensor_names(self._model).items():
            tensor.copy_(self.tensors[name])
        self.suit_(mask)

    def forget(self) -> None:
        """Whatever the model holds now, it shall keep."""
        self.tensors = {}

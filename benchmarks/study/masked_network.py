"""A masked dense network that changes its mask in place, for hundreds of forwards of sampled networks in a row.

It computes the same as the narrow network of a mask, at the cost of the dense one, but builds nothing: no tensor
changes its shape or its address, and the host does not wait, so a CUDA graph can include the draw of a mask.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from slimstart.devices import device_of
from slimstart.graph import ChannelGraph
from slimstart.narrow.compact import tensor_names
from slimstart.narrow.hooks import remove_hooks


class MaskedNetwork:
    """A full-size copy of a model in which everything that a mask drops is zero, as in `compact.masked`.

    In training mode normalisation uses the statistics of its batch; the running ones in the copy mean nothing.

    Args:
        model: the dense model, with its present values.
        graph: channel graph of the model.

    Attributes:
        module: the network of the last mask that was set; the model itself before.
    """

    def __init__(self, model: torch.nn.Module, graph: ChannelGraph) -> None:
        self.module = copy.deepcopy(model)
        remove_hooks(self.module)
        self._costs = graph.costs
        device = device_of(model)
        self._events = graph.costs.events.to(device)
        used = sorted({piece.axis for slices in graph.tensors.values() for piece in slices})
        self._sizes = [graph.axes[axis].numel() for axis in used]
        self._axes = torch.cat([graph.axes[axis] for axis in used]).to(device)
        own = tensor_names(self.module)
        # (the copy's tensor, its dense values, for every slice: which axis it depends on, and the shape to multiply in)
        self._tensors: list[tuple[Tensor, Tensor, list[tuple[int, list[int]]]]] = []
        for name, slices in graph.tensors.items():
            tensor = own[name].detach()
            shapes = [[-1 if dim == piece.dim % tensor.dim() else 1 for dim in range(tensor.dim())] for piece in slices]
            places = [used.index(piece.axis) for piece in slices]
            self._tensors.append((tensor, tensor.clone(), list(zip(places, shapes, strict=True))))

    @torch.no_grad()
    def set_(self, mask: Tensor) -> None:
        """Change to the network of a mask.

        Args:
            mask: a raw draw, a bool tensor of shape (num_units,).
        """
        mask = self._costs.at_least_one(mask.to(self._events.device))
        happens = torch.cat([mask, mask.new_zeros(1)])[self._events].any(1)  # the pads of `events` are -1
        present = torch.cat([happens, happens.new_ones(1)])[self._axes].split(self._sizes)
        for tensor, dense, (first, *others) in self._tensors:
            torch.mul(dense, present[first[0]].view(first[1]), out=tensor)
            for place, shape in others:
                tensor.mul_(present[place].view(shape))

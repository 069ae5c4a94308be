"""A narrow network that lives for a whole training run, while its tensors come and go with every draw.

Building a module anew for every draw would cost more than a training step of a small network. A `Subnet` copies the
user's module once, without its dense tensors, and then only exchanges tensors: values are copied into existing ones
where shapes have not changed, and new ones take their place where they have.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, Selection
from slimstart.subnet.compact import point_port, ports_in, set_attributes, tensor_names, tensor_places
from slimstart.subnet.streams import open_port


class Subnet:
    """The narrow module of one mask, and the way between it and the dense model.

    Parameters that the graph leaves whole are the dense model's own, shared; buffers are always copies, so that a
    forward which is not meant to leave a trace leaves none.

    Attributes:
        module: the narrow module; the same object for ever.
        selection: what it holds now; None before the first `load`.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        self.selection: Selection | None = None
        self._dense = tensor_names(model)
        stand_ins: dict[int, object] = {}
        self._moving: list[str] = []
        for name, tensor in self._dense.items():
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter and name not in graph.tensors:
                stand_ins[id(tensor)] = tensor
                continue
            self._moving.append(name)
            empty = tensor.detach().new_empty(0)
            stand_ins[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        self.module = copy.deepcopy(model, stand_ins)
        self._owners = {
            name: [(self.module.get_submodule(path), key) for path, key in places]
            for name, places in tensor_places(model).items()
            if name in self._moving
        }
        self._ports = {name: self.module.get_submodule(name) for name in ports_in(graph)}
        for layer in self._ports.values():
            open_port(layer)

    @torch.no_grad()
    def load(self, selection: Selection) -> None:
        """Become the network of another selection, with the dense model's present values."""
        for name in self._moving:
            dense = self._dense[name]
            narrow = selection.gather(name, dense.detach())
            owner, key = self._owners[name][0]
            current = getattr(owner, key)
            if current.shape == narrow.shape and current.device == narrow.device:
                current.copy_(narrow)
                current.grad = None
                continue
            narrow = narrow.clone() if narrow.data_ptr() == dense.data_ptr() else narrow
            is_parameter = isinstance(dense, nn.Parameter)
            fresh = nn.Parameter(narrow, dense.requires_grad) if is_parameter else narrow
            for owner, key in self._owners[name]:
                setattr(owner, key, fresh)
        torch.clear_autocast_cache()  # it knows tensors by identity, and some of them have new values
        set_attributes(self.module, selection)
        for name, layer in self._ports.items():
            point_port(layer, name, selection)
        self.selection = selection

    @torch.no_grad()
    def store(self) -> None:
        """Write parameters and buffers back into the dense model; what is not selected there stays untouched."""
        assert self.selection is not None
        for name in self._moving:
            self.selection.scatter_(name, self._dense[name].detach(), self.tensor(name).detach())

    def tensor(self, name: str) -> Tensor:
        owner, key = self._owners[name][0]
        tensor: Tensor = getattr(owner, key)
        return tensor

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The narrow parameters by name; those that are shared with the dense model are not listed."""
        found = {name: self.tensor(name) for name in self._moving}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, nn.Parameter)}

    @property
    def buffers(self) -> list[Tensor]:
        """The narrow buffers, statistics among them."""
        return [t for t in map(self.tensor, self._moving) if not isinstance(t, nn.Parameter)]

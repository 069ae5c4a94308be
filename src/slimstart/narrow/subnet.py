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
from torch.nn.modules.batchnorm import _NormBase

from slimstart.graph import ChannelGraph, Selection
from slimstart.narrow.compact import point_port, ports_in, set_attributes, tensor_names, tensor_places
from slimstart.narrow.streams import open_port


class Subnet:
    """The narrow module of one mask, and the way between it and the dense model.

    Parameters that the graph leaves whole are the dense model's own, shared; buffers are always copies, so that a
    forward which is not meant to leave a trace leaves none. Training and evaluation mode follow the dense model's.

    Args:
        model: the dense model.
        graph: of the model.
        device: where the narrow network is, if not with the dense model. Whole parameters are copies then.
        partner: whose copies of whole parameters to share.

    Attributes:
        module: the narrow module; the same object for ever.
        selection: what it was loaded with; None before the first `load`.
        ports: the layers that may need a port, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        device: torch.device | None = None,
        partner: Subnet | None = None,
    ) -> None:
        self.selection: Selection | None = None
        self._device = device
        places = tensor_places(model)
        self._homes = {name: (model.get_submodule(path), key) for name, ((path, key), *_) in places.items()}
        stand_ins: dict[int, object] = {}
        self._moving: list[str] = []
        for name, tensor in tensor_names(model).items():
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter and name not in graph.tensors and (device is None or partner is not None):
                stand_ins[id(tensor)] = tensor if partner is None else partner.tensor(name)
                continue
            self._moving.append(name)
            empty = tensor.detach().new_empty(0, device=device)
            if is_parameter and name not in graph.tensors:
                empty = torch.empty_like(tensor, device=device, requires_grad=False)  # never exchanged for another
            stand_ins[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        self.module = copy.deepcopy(model, stand_ins)
        self._owners = {
            name: [(self.module.get_submodule(path), key) for path, key in places[name]] for name in self._moving
        }
        self._pairs = list(zip(model.modules(), self.module.modules(), strict=True))
        self._twins: list[tuple[tuple[nn.Module, str], nn.Parameter]] = []
        # Buffers without channels (a causal mask) may be large and hardly ever change: copied when they do.
        self._seen: dict[str, tuple[int, int]] = {}  # versions of the dense and the narrow one when last equal
        self._constant = {
            name
            for name, (home, key) in self._homes.items()
            if name not in graph.tensors and key in home._buffers and not isinstance(home, _NormBase)
        }
        self.ports = {name: self.module.get_submodule(name) for name in ports_in(graph)}
        for layer in self.ports.values():
            open_port(layer)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, selection: Selection, ports: bool = True) -> None:
        """Become the network of another selection, with the dense model's present values.

        Args:
            ports: point those of layers on streams, too; without, whoever asks for that does it.
        """
        for name in self._moving:
            dense = self.dense(name)
            if self._is_seen(name):
                continue
            narrow = in_layout_of(dense, selection.gather(name, dense.detach())).to(self._device or dense.device)
            owner, key = self._owners[name][0]
            current = getattr(owner, key)
            if (current.shape, current.device, current.dtype) == (narrow.shape, narrow.device, narrow.dtype):
                current.copy_(narrow)
                current.grad = None
                self._note(name)
                continue
            self._put(name, narrow.clone() if narrow.data_ptr() == dense.data_ptr() else narrow)
            self._note(name)
        self._become(selection, ports)

    @torch.inference_mode(False)
    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor], selection: Selection) -> None:
        """Become the network of another selection, with these tensors; those that are not given stay."""
        for name, tensor in tensors.items():
            self._put(name, tensor)
        self._become(selection, ports=True)

    def _put(self, name: str, narrow: Tensor) -> None:
        dense = self.dense(name)
        fresh = nn.Parameter(narrow, dense.requires_grad) if isinstance(dense, nn.Parameter) else narrow
        for owner, key in self._owners[name]:
            setattr(owner, key, fresh)

    def _become(self, selection: Selection, ports: bool) -> None:
        torch.clear_autocast_cache()  # it knows tensors by identity, and some of them have new values
        set_attributes(self.module, selection)
        if ports:
            for name, layer in self.ports.items():
                point_port(layer, name, selection)
        self._twins = [(self._homes[name], parameter) for name, parameter in self.parameters.items()]
        self.follow_modes()
        self.selection = selection

    def _note(self, name: str) -> None:
        if name in self._constant:
            self._seen[name] = (self.dense(name)._version, self.tensor(name)._version)

    def follow_modes(self) -> None:
        """Be in training or evaluation mode, and frozen, wherever the dense model is."""
        for dense, narrow in self._pairs:
            if narrow.training is not dense.training:  # to set an attribute of a module takes far longer than to look
                narrow.training = dense.training
        for (home, key), parameter in self._twins:
            twin = home._parameters[key]
            if twin is not None and twin.requires_grad is not parameter.requires_grad:
                parameter.requires_grad_(twin.requires_grad)

    @torch.inference_mode(False)
    @torch.no_grad()
    def store(self) -> None:
        """Write parameters and buffers back into the dense model; what is not selected there stays untouched."""
        assert self.selection is not None
        for name in self._moving:
            if self._is_seen(name):
                continue
            dense = self.dense(name).detach()
            self.selection.scatter_(name, dense, self.tensor(name).detach().to(dense.device))
            self._note(name)

    def dense(self, name: str) -> Tensor:
        """The dense model's tensor of this name, as it is now: `model.to(...)` replaces buffers."""
        home, key = self._homes[name]
        tensor: Tensor = getattr(home, key)
        return tensor

    def tensor(self, name: str) -> Tensor:
        owner, key = self._owners[name][0]
        tensor: Tensor = getattr(owner, key)
        return tensor

    def has_own(self, name: str) -> bool:
        """Whether the tensor of this name is the narrow network's own, and not shared."""
        return name in self._owners

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The narrow parameters by name; those that are shared are not listed."""
        found = {name: self.tensor(name) for name in self._moving}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, nn.Parameter)}

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers by name."""
        found = {name: self.tensor(name) for name in self._moving}
        return {name: tensor for name, tensor in found.items() if not isinstance(tensor, nn.Parameter)}

    @property
    def statistics(self) -> list[Tensor]:
        """The buffers that a forward is expected to change."""
        changing = [self.tensor(name) for name in self.changing]
        return [tensor for tensor in changing if not isinstance(tensor, nn.Parameter)]

    @property
    def changing(self) -> list[str]:
        """Everything that a step may change: all that is not a buffer without channels which has stayed as it was."""
        return [name for name in self._moving if name not in self._constant or not self._is_seen(name)]

    def _is_seen(self, name: str) -> bool:
        return self._seen.get(name) == (self.dense(name)._version, self.tensor(name)._version)


def in_layout_of(dense: Tensor, narrow: Tensor) -> Tensor:
    """A narrow tensor with its dimensions in the order, in memory, that they have in the dense one (channels-last)."""
    order = sorted(range(dense.dim()), key=lambda dim: -dense.stride()[dim])
    if order == list(range(dense.dim())):
        return narrow
    inverse = [order.index(dim) for dim in range(dense.dim())]
    return narrow.permute(order).contiguous().permute(inverse)

"""Modules whose tensors are those of a selection: the user's own, copies that follow it, and references."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, Selection
from slimstart.narrow.change import Change
from slimstart.narrow.compact import (
    RECORD,
    Record,
    attribute_values,
    port_sides,
    ports_in,
    tensor_names,
    tensor_places,
)
from slimstart.narrow.hooks import remove_hooks
from slimstart.narrow.store import Key, Store
from slimstart.narrow.stream_ports import close_port, set_port


class Network:
    """A module whose tensors are those of a selection; the same module for ever.

    Args:
        module: of the class of the graph's model, with the same names.
        graph: of the model.
    """

    def __init__(self, module: nn.Module, graph: ChannelGraph) -> None:
        self.module, self.graph = module, graph
        places = tensor_places(module)
        self._owners = {
            name: [(module.get_submodule(path), key) for path, key in places[name]] for name in graph.tensors
        }
        self._parameters = {name: p for name, p in module.named_parameters() if name in graph.tensors}
        owners = {owner for found in self._owners.values() for owner, _ in found}
        self._layers = [
            (f"{path}.{key}".lstrip("."), parent, key, layer)
            for path, parent in module.named_modules()
            for key, layer in parent._modules.items()
            if layer is not None and not owners.isdisjoint(layer.modules())
        ]
        self.ports = {name: module.get_submodule(name) for name in ports_in(graph)}

    def tensor(self, name: str) -> Tensor:
        """The narrow tensor of this name, as it is now: `model.to(...)` replaces buffers."""
        owner, key = self._owners[name][0]
        tensor: Tensor = getattr(owner, key)
        return tensor

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that can shrink, by name."""
        return self._parameters

    def check(self) -> None:
        """Refuse a module in which somebody has exchanged a layer or a parameter."""
        layers = [name for name, parent, key, layer in self._layers if parent._modules.get(key) is not layer]
        for name in layers or [
            name
            for name, parameter in self._parameters.items()
            if any(owner._parameters.get(key) is not parameter for owner, key in self._owners[name])
        ]:
            raise RuntimeError(
                f"{name!r} of the model is another {'layer' if layers else 'parameter'} than when the SparseTraining "
                "was made. Replace layers before that; `finish` comes before other changes"
            )

    def write(self, store: Store, selection: Selection) -> None:
        """Bring a store up to date with this network, which holds a selection."""
        for name in self.graph.tensors:
            store.write(Key(name), selection, self.tensor(name).detach())

    def fill(self, change: Change, store: Store, selection: Selection, device: torch.device, in_place: bool) -> None:
        """Become the network of a selection, with the values of a store."""
        assign = change.copy if in_place else change.swap
        for name in self.graph.tensors:
            assign(self.tensor(name), store.read(Key(name), selection, device))
        for owner, attribute, value in attribute_values(self.module, selection):
            change.set(owner, attribute, value)

    def finish(self, change: Change, store: Store, selection: Selection, device: torch.device, plain: bool) -> None:
        """Become the plain network of a selection: no port that is not needed, with `plain` none at all."""
        for name in self.graph.tensors:
            change.swap(self.tensor(name), store.read(Key(name), selection, device, plain))
        for owner, attribute, value in attribute_values(self.module, selection, plain):
            change.set(owner, attribute, value)
        for name, layer in self.ports.items():
            sides, width, dims = port_sides(name, selection)
            if plain or all(side is None for side in sides):
                change.call(close_port, layer)
            else:
                change.call(set_port, layer, sides[0], sides[1], width, dims)
        dense = store.tensors
        shapes = {name: tuple(dense.get(name, t).shape) for name, t in tensor_names(self.module).items()}
        shapes = {name: shape for name, shape in shapes.items() if ".stream_" not in f".{name}"}
        change.put(vars(self.module), RECORD, Record(tuple(self.graph.attributes), shapes))

    def point_ports(self, change: Change, selection: Selection) -> None:
        """Point the ports of layers on streams at what a selection keeps."""
        for name, layer in self.ports.items():
            sides, width, dims = port_sides(name, selection)
            change.call(set_port, layer, sides[0], sides[1], width, dims)


class Companion(Network):
    """A second network beside the model: it shares parameters that cannot shrink, and has buffers of its own.

    So a forward through it leaves no trace in the model.

    Args:
        model: narrow or dense.
        graph: of the model.
        whole_buffers: owners and names of the model's buffers that cannot shrink.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph, whole_buffers: Sequence[tuple[nn.Module, str]]) -> None:
        memo: dict[int, object] = {}
        for name, tensor in tensor_names(model).items():
            if name in graph.tensors:
                empty = tensor.detach().new_empty(0)
                memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
            elif isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = tensor
        module = copy.deepcopy(model, memo)
        remove_hooks(module)
        super().__init__(module, graph)
        self._pairs = list(zip(model.modules(), module.modules(), strict=True))
        self._seen: dict[int, tuple[int, int]] = {}  # versions of both buffers when they were last equal
        twins = dict(self._pairs)
        self._buffers = [(twins[owner], key) for owner, key in whole_buffers]

    @torch.no_grad()
    def follow(self, values: Sequence[Tensor]) -> None:
        """Be in the model's modes, and have these values of the buffers that cannot shrink."""
        for mine, twin in self._pairs:
            if twin.training is not mine.training:  # to set an attribute of a module takes far longer than to look
                twin.training = mine.training
        for number, (value, (twin, key)) in enumerate(zip(values, self._buffers, strict=True)):
            own = self.buffer(number)
            if self._seen.get(number) == (value._version, own._version):
                continue
            if alike(own, value):
                own.copy_(value)
            else:
                own = twin._buffers[key] = value.detach().clone()
            self._seen[number] = (value._version, own._version)

    def buffer(self, number: int) -> Tensor:
        """One of the buffers that cannot shrink."""
        twin, key = self._buffers[number]
        buffer: Tensor = getattr(twin, key)
        return buffer

    def become(self, store: Store, selection: Selection, device: torch.device, values: Sequence[Tensor]) -> None:
        """Be the network of a selection; `values` as for `follow`."""
        change = Change()
        self.fill(change, store, selection, device, in_place=False)
        self.point_ports(change, selection)
        change.apply()
        torch.clear_autocast_cache()  # it knows tensors by identity, and they have new values
        self.follow(values)


class WholeBuffers:
    """A model's buffers that cannot shrink, and what they held at the beginning of a step.

    References begin a step with what the model begins it with; a forward of the model may change it, and may run in
    parallel.

    Attributes:
        places: owners and names.
    """

    def __init__(self, network: Network) -> None:
        shrinking = {id(network.tensor(name)) for name in network.graph.tensors}
        self.places = [
            (owner, key)
            for owner in network.module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and id(buffer) not in shrinking
        ]
        self._noted: dict[int, tuple[Tensor, int]] = {}  # values, and their versions then
        self._changing: set[int] = set()  # those that have been seen to change

    @property
    def values(self) -> list[Tensor]:
        """What they hold now."""
        return [getattr(owner, key) for owner, key in self.places]

    @property
    def is_noted(self) -> bool:
        return len(self._noted) == len(self.places)

    @property
    def noted(self) -> list[Tensor]:
        """What they held when they were noted."""
        return [self._noted[number][0] for number in range(len(self.places))]

    @property
    def changing(self) -> list[int]:
        """The numbers of those that have been seen to change."""
        return sorted(self._changing)

    @torch.no_grad()
    def note(self) -> bool:
        """Note their values; returns whether a graph that reads the noted ones must be captured again."""
        stale = False
        copies: list[Tensor] = []
        values: list[Tensor] = []
        for number, buffer in enumerate(self.values):
            noted, version = self._noted.get(number, (None, -1))
            if noted is None or not alike(noted, buffer):
                self._noted[number] = buffer.detach().clone(), buffer._version
                stale |= number in self._changing
                continue
            if version != buffer._version:
                stale |= number not in self._changing
                self._changing.add(number)
                self._noted[number] = noted, buffer._version
            if number in self._changing:  # without a new version, too: a graph gives none
                copies.append(noted)
                values.append(buffer)
        if copies:
            torch._foreach_copy_(copies, values)
        return stale

    def clear(self) -> None:
        """Give the memory back."""
        self._noted.clear()


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors can be copied into each other as they are."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)

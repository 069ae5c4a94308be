"""A module that becomes the network of one selection after another: the user's model, a copy of it, a reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, Selection
from slimstart.narrow.change import Change
from slimstart.narrow.compact import (
    RECORD,
    attribute_values,
    fit_port,
    port_sides,
    ports_in,
    record_of,
    tensor_names,
    tensor_places,
    write_count,
)
from slimstart.narrow.removed_layers import modules_of, replacement
from slimstart.narrow.store import Key, Store
from slimstart.narrow.stream_ports import set_port


class Network:
    """A module whose tensors are those of a selection; module and parameters remain the same objects.

    Args:
        module: module of the class of the graph's model, with the same names.

    Attributes:
        names: {key in the state dict of the whole model, of which a tensor may have several: name of a tensor that can
            shrink}.
        parameters: those that can shrink, by name.
        ports: the layers that may need a port, by name.
    """

    def __init__(self, module: nn.Module, graph: ChannelGraph) -> None:
        self.module, self.graph = module, graph
        self._modules = dict(module.named_modules(remove_duplicate=False))  # also those that are removed later
        places = tensor_places(module)
        self.names = {f"{path}.{key}".lstrip("."): name for name in graph.tensors for path, key in places[name]}
        self._owners = {
            name: [(module.get_submodule(path), key) for path, key in places[name]] for name in graph.tensors
        }
        self.parameters = {name: p for name, p in module.named_parameters() if name in graph.tensors}
        self._holders = owners = {owner for found in self._owners.values() for owner, _ in found}
        self._layers = [
            (f"{path}.{key}".lstrip("."), parent, key, layer)
            for path, parent in module.named_modules()
            for key, layer in parent._modules.items()
            if layer is not None and not owners.isdisjoint(layer.modules())
        ]
        self.ports = {name: module.get_submodule(name) for name in ports_in(graph)}
        self._removable = {
            name: _Place(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], original, identity)
            for name, instead in modules_of(graph.layers)
            for original in [module.get_submodule(name)]
            for identity in [replacement(original, instead)]
        }

    def tensor(self, name: str) -> Tensor:
        """The present narrow tensor of this name; `model.to(...)` replaces buffers, so it is looked up each time."""
        owner, key = self._owners[name][0]
        tensor: Tensor = getattr(owner, key)
        return tensor

    def check(self) -> None:
        """Refuse a module in which a layer or a parameter has been replaced."""
        identities = {id(place.original): place.identity for place in self._removable.values()}
        layers = [
            name
            for name, parent, key, layer in self._layers
            if all(parent._modules.get(key) is not one for one in (layer, identities.get(id(layer), layer)))
        ]
        for name in layers or [
            name
            for name, parameter in self.parameters.items()
            if any(owner._parameters.get(key) is not parameter for owner, key in self._owners[name])
        ]:
            raise RuntimeError(
                f"{name!r} of the model is another {'layer' if layers else 'parameter'} than when the SparseTraining "
                "was made. Replace layers and parameters before making it, or after `finish`"
            )

    def write(self, store: Store, selection: Selection) -> None:
        """Write the tensors of this network, which has a selection, to a store."""
        for name in selection.graph.tensors:
            store.write(Key(name), selection, self.tensor(name).detach())

    def fill(
        self,
        change: Change,
        store: Store,
        selection: Selection,
        device: torch.device,
        in_place: bool,
        plain: bool = False,
    ) -> None:
        """Add to a change: become the network of a selection, with the values of a store; `plain` as for `compact`."""
        assign = change.copy if in_place else change.swap
        for name in selection.graph.tensors:
            assign(self.tensor(name), store.read(Key(name), selection, device, plain))
        for owner, attribute, value in attribute_values(selection, plain):
            change.call(write_count, self._modules[owner], attribute, value)
        self._place_layers(change, selection.graph, device)
        if not in_place:
            change.call(self._renew_dicts)

    def finish(self, change: Change, store: Store, selection: Selection, device: torch.device, plain: bool) -> None:
        """Add to a change: become the network of a selection without unneeded ports, or with `plain` without any."""
        self.fill(change, store, selection, device, in_place=False, plain=plain)
        for name in ports_in(selection.graph):
            change.call(fit_port, self.ports[name], port_sides(name, selection), plain)
        record = record_of(selection.graph, tensor_names(self.module), store.tensors)
        change.put(vars(self.module), RECORD, record)

    def _renew_dicts(self) -> None:
        """Replace the dicts of parameters and buffers by copies.

        Compiled code of PyTorch 2.8 does not check shapes again while these dicts are unchanged.
        """
        for holder in self._holders:
            vars(holder).update(_parameters=holder._parameters.copy(), _buffers=holder._buffers.copy())

    def _place_layers(self, change: Change, graph: ChannelGraph, device: torch.device) -> None:
        """Put the identity in the place of the layers that a graph is without, and all others in their own.

        The user may have changed the mode and the type of the model since a module was replaced.
        """
        removed = dict(modules_of(graph.removed))
        for name, place in self._removable.items():
            present, wanted = place.parent._modules[place.key], place.identity if name in removed else place.original
            if present is not wanted:
                assert present is not None
                change.call(set_mode, wanted, present.training)
                change.call(partial(wanted.to, device=device, dtype=common_type(self.module)))
                change.put(place.parent._modules, place.key, wanted)

    def removed_modules(self, graph: ChannelGraph) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of everything that the identity replaces in a graph."""
        return ((name, self._removable[name].original) for name, _ in modules_of(graph.removed))

    def clear_gradients(self) -> None:
        """Drop all gradients, also those of layers that have just been removed."""
        for module in (*self.module.modules(), *self._modules.values()):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.grad = None

    def point_ports(self, change: Change, selection: Selection) -> None:
        """Add to a change: set the ports of layers on streams to what a selection keeps."""
        for name in ports_in(selection.graph):
            change.call(set_port, self.ports[name], *port_sides(name, selection))


class _Place(NamedTuple):
    """A module that can be replaced by the identity, and where it belongs."""

    parent: nn.Module
    key: str
    original: nn.Module
    identity: nn.Module


def set_mode(module: nn.Module, training: bool) -> None:
    """Give a module a mode. If it has that already, modules within it keep modes of their own."""
    if module.training is not training:
        module.train(training)


def common_type(model: nn.Module) -> torch.dtype | None:
    """The type of all floating-point parameters; None if there are several."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def find_copy(copy: nn.Module, model: nn.Module) -> nn.Module:
    """The copy of a model that a module is, or holds.

    Args:
        copy: a copy of the model as it is now, or a module that holds one as `module` or `ema_model`.
    """
    shapes = {name: tensor.shape for name, tensor in tensor_names(model).items()}
    for module in (copy, getattr(copy, "module", None), getattr(copy, "ema_model", None)):
        if not isinstance(module, nn.Module) or module is model:
            continue
        if {name: tensor.shape for name, tensor in tensor_names(module).items()} == shapes:
            return module
    raise ValueError(
        "`copy` is no copy of the model as it is now: names or shapes differ. Make it after the SparseTraining, with "
        "copy.deepcopy(model), AveragedModel(model) or the like"
    )

"""compact(model, selection) -> a narrow nn.Module: real small layers, no masks, no hooks, no dense memory.

The module is a copy of the user's own (same class, same forward) in which every parameter and buffer holds only the
entries that the selection keeps, and the integer attributes that count channels count those that are left.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimstart.graph import ChannelGraph, PaddedSelection, Port, Selection
from slimstart.narrow.streams import Side, close_port, open_port, set_port

RECORD = "_slimstart_record"
"""Where a narrow module keeps its `Record`, for `slimstart.save`."""


@dataclass(frozen=True)
class Record:
    """What a narrow module's own tensors do not tell.

    Attributes:
        counted: (module, attribute) pairs that count channels.
        dense: the shapes of the dense model's tensors.
    """

    counted: tuple[tuple[str, str], ...]
    dense: dict[str, tuple[int, ...]]


def tensor_names(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model once, under its first name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def tensor_places(model: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """For every name in `tensor_names`, all (module, attribute) pairs under which the model holds the tensor."""
    names = {id(tensor): name for name, tensor in tensor_names(model).items()}
    places: dict[str, list[tuple[str, str]]] = {name: [] for name in names.values()}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places[names[id(tensor)]].append((path, key))
    return places


def compact(model: nn.Module, selection: Selection, plain: bool = False) -> nn.Module:
    """A narrow copy of a model.

    Args:
        model: the dense model that the selection's graph was traced from.
        selection: what stays, from `graph.select(mask)`.
        plain: do without `StreamPort`: layers on a residual stream become as wide as the stream, with rows of zeros.
    """
    narrow: dict[int, object] = {}
    for name, tensor in tensor_names(model).items():
        kept = _carried(selection, name, tensor.detach()) if plain else selection.gather(name, tensor.detach())
        kept = kept.clone() if kept.data_ptr() == tensor.data_ptr() else kept.contiguous(memory_format=_format(tensor))
        is_parameter = isinstance(tensor, nn.Parameter)
        narrow[id(tensor)] = nn.Parameter(kept, requires_grad=tensor.requires_grad) if is_parameter else kept
    module = copy.deepcopy(model, narrow)
    set_attributes(module, selection, plain)
    dense = {name: tuple(tensor.shape) for name, tensor in tensor_names(model).items()}
    vars(module)[RECORD] = Record(tuple(selection.graph.attributes), dense)
    if not plain:
        for name in ports_in(selection.graph):
            layer = module.get_submodule(name)
            open_port(layer)
            if not point_port(layer, name, selection):
                close_port(layer)
    return module


def _format(tensor: Tensor) -> torch.memory_format:
    """How a tensor lies in memory: a narrow network is as fast as its dense one only if it lies there likewise."""
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _carried(selection: Selection, name: str, dense: Tensor) -> Tensor:
    """As wide as the tensors around the layer, with zeros where the layer itself has nothing."""
    for piece in selection.graph.tensors.get(name, ()):
        carried = selection.present(piece.carried).nonzero().squeeze(1)
        absent = (~selection.present(piece.axis)[carried]).nonzero().squeeze(1)
        dense = dense.index_select(piece.dim, carried.to(dense.device))
        if absent.numel():
            dense = dense.index_fill(piece.dim, absent.to(dense.device), 0)
    return dense


def set_attributes(module: nn.Module, selection: Selection, plain: bool = False) -> None:
    """Set the integers that count channels."""
    for (owner, attribute), counter in selection.graph.attributes.items():
        axis = counter.carried if plain else counter.axis
        gone = selection.graph.axes[axis].numel() - selection.count(axis)
        setattr(module.get_submodule(owner), attribute, counter.dense - gone)


def ports_in(graph: ChannelGraph) -> list[str]:
    """Names of the layers that may need a port."""
    return list(dict.fromkeys([*graph.reads, *graph.writes]))


def point_port(layer: nn.Module, name: str, selection: Selection) -> bool:
    """Point a layer's port at what the selection keeps; returns whether it is needed."""
    graph, dims = selection.graph, [0, 0]
    sides: list[Side | None] = [None, None]
    width = 0
    for side, ports in enumerate((graph.reads, graph.writes)):
        if name in ports:
            port = ports[name]
            dims[side], width = port.dim, selection.count(port.carried)
            sides[side] = _side(selection, port)
    set_port(layer, sides[0], sides[1], width, (dims[0], dims[1]))
    return any(side is not None for side in sides)


def _side(selection: Selection, port: Port) -> Side | None:
    """Where a layer's channels are in the stream, and back; None where they are the same."""
    carried, live = selection.present(port.carried), selection.present(port.live)
    if torch.equal(carried, live):
        return None
    real = selection.real(port.live) & selection.real(port.carried)
    seats = [torch.where(real, torch.cumsum(there, 0) - 1, -1) for there in (carried, live)]
    return Side(seats[0][live], seats[1][carried] if isinstance(selection, PaddedSelection) else None)


def masked(model: nn.Module, selection: Selection) -> nn.Module:
    """The masked dense network: a full-size copy in which every entry that the selection drops is zero.

    Its filters, normalisation rows and readers' columns are zero together, so a dropped channel is zero wherever
    channels are mixed or added. This is what a narrow network must equal.
    """
    module = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in tensor_names(module).items():
            for dim, kept in selection.indices(name).items():
                gone = torch.ones(tensor.shape[dim], dtype=torch.bool)
                gone[kept] = False
                tensor.index_fill_(dim, gone.nonzero().squeeze(1).to(tensor.device), 0)
    return module

"""compact(model, selection) -> a narrow nn.Module: small layers, no masks, no hooks, no dense memory.

The module is a copy of the user's own (same class, same forward) in which every parameter and buffer has only the
entries that the selection keeps, and integer attributes that count channels are reduced.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slimstart.graph import ChannelGraph, Port, Selection
from slimstart.narrow.kept_norms import over_kept_channels
from slimstart.narrow.removed_layers import Instead, PassThrough, modules_of, replacement
from slimstart.narrow.stream_ports import BUFFERS, Dims, Side, close_port, set_port

RECORD = "_slimstart_record"
"""The attribute in which a narrow module has its `Record`, for `slimstart.save`."""

_ENTRY = re.compile(r"(.+)\[(\d{1,4})\]")


@dataclass(frozen=True)
class Record:
    """Facts that a narrow module's own tensors do not show.

    Attributes:
        counted: (module, attribute) pairs that count channels.
        dense: the shapes of the dense model's tensors, without those of removed layers.
        removed: modules that are gone, with what takes their places.
    """

    counted: tuple[tuple[str, str], ...]
    dense: dict[str, tuple[int, ...]]
    removed: dict[str, Instead]


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
        selection: kept channels, from `graph.select(mask)`.
        plain: without `StreamPort`: layers on a residual stream become as wide as the stream, with rows of zeros.
    """
    return narrow_copy(model, tensor_names(model), selection, plain)


def narrow_copy(
    model: nn.Module,
    dense: Mapping[str, Tensor],
    selection: Selection,
    plain: bool = False,
    device: torch.device | None = None,
) -> nn.Module:
    """A copy of a model of any width, with the tensors of a selection.

    Args:
        dense: dense values by name, of every tensor that can shrink.
        device: of the copy, if not that of the dense values.
    """
    # `deepcopy` takes entries of `memo` in place of the originals, so no dense tensor is copied, and shared tensors
    # remain shared.
    memo: dict[int, object] = {}
    removed = dict(modules_of(selection.graph.removed))
    for name, instead in removed.items():
        gone = model.get_submodule(name)
        memo[id(gone)] = replacement(gone, instead)
    tensors = tensor_names(model)
    for name in selection.graph.tensors:
        narrow = narrow_tensor(selection, name, dense[name].detach(), plain).to(device or dense[name].device)
        is_parameter = isinstance(tensors[name], nn.Parameter)
        memo[id(tensors[name])] = nn.Parameter(narrow, tensors[name].requires_grad) if is_parameter else narrow
    module = copy.deepcopy(model, memo)
    for owner, attribute, value in attribute_values(selection, plain):
        write_count(module.get_submodule(owner), attribute, value)
    vars(module)[RECORD] = record_of(selection.graph, tensors, dense)
    for name in ports_in(selection.graph):
        fit_port(module.get_submodule(name), port_sides(name, selection), plain)
    return module


def record_of(graph: ChannelGraph, tensors: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> Record:
    """The record of a narrow module.

    Args:
        tensors: tensors of the module by name, of any width, with or without those of ports.
        dense: dense values by name, of every tensor that can shrink.
    """
    shapes = {
        name: tuple(dense.get(name, tensor).shape)
        for name, tensor in tensors.items()
        if name.rpartition(".")[2] not in BUFFERS and not any(layer.has(name) for layer in graph.removed)
    }
    return Record(tuple(graph.attributes), shapes, dict(modules_of(graph.removed)))


def narrow_tensor(selection: Selection, name: str, dense: Tensor, plain: bool = False) -> Tensor:
    """The narrow tensor of a dense one, with its dimensions in the same order in memory; arguments as for `compact`."""
    return in_order_of(dense, _carried(selection, name, dense) if plain else selection.gather(name, dense))


def in_order_of(dense: Tensor, narrow: Tensor) -> Tensor:
    """A narrow tensor with its dimensions in the same memory order as in the dense one (channels-last)."""
    order = sorted(range(dense.dim()), key=lambda dim: -dense.stride()[dim])
    if order == list(range(dense.dim())):
        return narrow.contiguous()
    inverse = [order.index(dim) for dim in range(dense.dim())]
    return narrow.permute(order).contiguous().permute(inverse)


def _carried(selection: Selection, name: str, dense: Tensor) -> Tensor:
    """The tensor of a layer without a port: as wide as the tensors around it, with zeros for channels it has not."""
    dense = dense.clone()
    for piece in selection.graph.tensors.get(name, ()):
        carried = selection.present(piece.carried).nonzero().squeeze(1)
        absent = (~selection.present(piece.axis)[carried]).nonzero().squeeze(1)
        dense = dense.index_select(piece.dim, carried.to(dense.device))
        if absent.numel():
            dense = dense.index_fill(piece.dim, absent.to(dense.device), 0)
    return dense


def attribute_values(selection: Selection, plain: bool = False) -> Iterator[tuple[str, str, int]]:
    """(module, attribute, value) of the integers that count channels."""
    for (owner, attribute), counter in selection.graph.attributes.items():
        axis = counter.carried if plain else counter.axis
        gone = selection.graph.axes[axis].numel() - selection.count(axis)
        yield owner, attribute, counter.dense - gone


def ports_in(graph: ChannelGraph) -> list[str]:
    """Names of the layers that may need a port."""
    return list(dict.fromkeys([*graph.reads, *graph.writes]))


Sides = tuple[Side | None, Side | None, int, Dims]


def port_sides(name: str, selection: Selection) -> Sides:
    """Arguments of `set_port`: what a layer reads and writes, the width of the stream it writes, and the dimensions."""
    read, write = selection.graph.reads.get(name), selection.graph.writes.get(name)
    last = write or read
    return (
        None if read is None else _side(selection, read),
        None if write is None else _side(selection, write),
        0 if last is None else selection.count(last.carried),
        (0 if read is None else read.dim, 0 if write is None else write.dim),
    )


def fit_port(layer: nn.Module, sides: Sides, plain: bool) -> None:
    """Give a layer a port with the result of `port_sides`, or none where it needs none; `plain` as for `compact`."""
    if plain or sides[:2] == (None, None):
        close_port(layer)
    else:
        set_port(layer, *sides)


def _side(selection: Selection, port: Port) -> Side | None:
    """The position of each of a layer's channels in the stream, and with padding the inverse; None where they agree."""
    carried, live = selection.present(port.carried), selection.present(port.live)
    if torch.equal(carried, live):
        return None
    real = selection.real(port.live) & selection.real(port.carried)
    # A running count gives each channel its position among those that are there; -1 marks padding.
    positions = [torch.where(real, torch.cumsum(there, 0) - 1, -1) for there in (carried, live)]
    return Side(positions[0][live], positions[1][carried] if selection.padded else None)


def masked(model: nn.Module, selection: Selection) -> nn.Module:
    """The masked dense network: a full-size copy in which every entry that the selection drops is zero.

    Filters, normalisation rows and readers' columns are zero together, so a dropped channel is zero wherever channels
    are mixed or added. Removed layers are gated: they return their input, or zeros of the shape of their result where
    the forward around them adds that to a stream. Norms that shrink run over kept channels.
    This is what a narrow network must equal.
    """
    module = copy.deepcopy(model)
    for layer in selection.graph.removed:
        if layer.added:  # the other modules of a branch run, for no reader
            last = module.get_submodule(layer.modules[-1])
            last.forward = partial(_gated, last.forward)
            continue
        for name, num_results in zip(layer.modules, layer.num_results, strict=True):
            module.get_submodule(name).forward = PassThrough(num_results or 0).forward
    with torch.no_grad():
        for name, tensor in tensor_names(module).items():
            for dim, kept in selection.indices(name).items():
                gone = torch.ones(tensor.shape[dim], dtype=torch.bool)
                gone[kept] = False
                tensor.index_fill_(dim, gone.nonzero().squeeze(1).to(tensor.device), 0)
    over_kept_channels(module, selection)
    return module


def _gated(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a forward, with zeros in place of its tensors."""
    return tree_map_only(Tensor, torch.zeros_like, forward(*args, **kwargs))


# --- attributes that count channels ----------------------------------------------------------------------------------


def read_count(module: nn.Module, name: str) -> Any:
    """The value of an attribute that counts channels; None if there is no such.

    Its name is "heads", "splits[1]" for an entry of a list or tuple, or "config.heads" for an attribute of a
    configuration.
    """
    attribute, index, inner = _parsed(name)
    value = vars(module).get(attribute)
    if inner:
        return getattr(value, "__dict__", {}).get(inner)
    if index is None:
        return value
    return value[index] if isinstance(value, list | tuple) and index < len(value) else None


def write_count(module: nn.Module, name: str, value: Any) -> None:
    """Set such an attribute; entries in a new object, since the old one may be another module's too."""
    attribute, index, inner = _parsed(name)
    if inner:
        configuration = copy.copy(getattr(module, attribute))
        vars(configuration)[inner] = value
        value = configuration
    elif index is not None:
        entries = getattr(module, attribute)
        value = type(entries)([*entries[:index], value, *entries[index + 1 :]])
    setattr(module, attribute, value)


def _parsed(name: str) -> tuple[str, int | None, str]:
    """The attribute of the module, and in it the index of an entry or the name of an attribute."""
    attribute, _, inner = name.partition(".")
    found = _ENTRY.fullmatch(name)
    return (attribute, None, inner) if found is None or inner else (found[1], int(found[2]), "")

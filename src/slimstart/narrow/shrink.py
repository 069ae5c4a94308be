"""shrink_to(model, state_dict): make a dense module as narrow as a state dict, and load it.

For networks that are used without a training: in another process, by another program, from a file of plain tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from slimstart.errors import CheckpointError
from slimstart.graph import ChannelGraph, trace
from slimstart.narrow.change import Change
from slimstart.narrow.compact import read_count, tensor_names, tensor_places, write_count
from slimstart.narrow.hooks import hooks_in
from slimstart.narrow.removed_layers import Instead, checked, modules_of, replacement
from slimstart.narrow.store import is_dense
from slimstart.narrow.stream_ports import PORT

METADATA = "slimstart"
"""The key under which the state dicts of a model in training, and of its optimizer, have their structure."""


@torch.no_grad()
def shrink_to(model: nn.Module, state_dict: Mapping[str, Any], example_inputs: Any = None) -> nn.Module:
    """Make a dense module fit a narrow state dict, in place, and load it.

    Tensors get the shapes of the state dict, integer attributes that count channels are reduced, and the identity takes
    the place of removed layers. The attributes of PyTorch's own layers follow from the shapes. Others (`num_heads` of
    your own attention block) and the names of removed layers are part of the state dict of a model in training, or are
    found by tracing the model on `example_inputs`.

    Args:
        model: instance of the class that was trained, dense or already as narrow as the state dict.
        state_dict: of a narrow network; from `finish(plain=True)`, or any other without ports on residual streams.
        example_inputs: as for `trace`; needed for models with counting attributes of their own, and for networks
            without some layers, unless the state dict is that of a model in training.

    Returns:
        The model.

    Raises:
        CheckpointError: names differ, a tensor is wider than the model's, or layers have ports; nothing is changed.
        ValueError: the model is in a SparseTraining.
    """
    if hooks_in(model):
        raise ValueError("`model` is in a SparseTraining; `model.load_state_dict` takes a narrow state dict by itself")
    every = metadata_of(state_dict)
    metadata = _checked(every.get("", {}).get(METADATA, {}), model)
    # Norms that shrink may have all their channels, so this graph is also that of a training in which they do not.
    graph = None if example_inputs is None else trace(model, example_inputs, "stream", norms="shrink")
    tensors, places = tensor_names(model), tensor_places(model)
    wanted: dict[str, Tensor] = {}
    problems = []
    persistent = model.state_dict(keep_vars=True).keys()
    identities = metadata.get("identities", {}) | _removed(graph, persistent, state_dict)
    gone = tuple(f"{module}." for module in identities)
    if odd := sorted({key for key in persistent if not key.startswith(gone)} ^ set(state_dict)):
        hint = "" if set(odd) - persistent or graph else "; if whole layers were removed, give `example_inputs`"
        problems.append(f"the model and the state dict differ in {', '.join(odd[:3])}{hint}")
    for name, tensor in tensors.items():
        aliases = [f"{path}.{key}" if path else key for path, key in places[name]]
        values = [state_dict[alias] for alias in aliases if isinstance(state_dict.get(alias), Tensor)]
        if not values:  # in the state dict it is no tensor, or it is a buffer that is not saved
            problems.extend(f"{alias} is no tensor" for alias in aliases if alias in state_dict)
            continue
        value = wanted[name] = values[0]
        if not is_dense(value):
            problems.append(f"{name} is a tensor of another kind ({value.layout}, {value.device})")
        elif value.dim() != tensor.dim() or any(n > d for n, d in zip(value.shape, tensor.shape, strict=False)):
            problems.append(f"{name} is {tuple(value.shape)} in the state dict and {tuple(tensor.shape)} in the model")
    for (path, attribute), number in metadata.get("attributes", {}).items():
        if number > (most := read_count(model.get_submodule(path), attribute)):
            problems.append(f"{attribute} of {path!r} is {number} in the state dict and {most} in the model")
    if any(module.get(PORT) not in (None, [None, None]) for module in every.values()):
        problems.append("layers have ports on residual streams; take the state dict after `finish(plain=True)`")
    if problems:
        raise CheckpointError(
            f"`state_dict` does not fit `model`: {'; '.join(problems[:3])}. The model must be of the class that was "
            "trained, and dense"
        )
    attributes = metadata.get("attributes", {}) | ({} if graph is None else _traced(graph, wanted))
    change = Change()
    for name, value in wanted.items():
        tensor = tensors[name]
        change.swap(tensor, value.detach().to(tensor.device, tensor.dtype, copy=True))
    shapes = {name: value.shape for name, value in wanted.items()}
    for path, module in model.named_modules():
        for attribute, number in _layer_attributes(path, module, shapes):
            change.set(module, attribute, number)
    for (path, attribute), number in attributes.items():
        change.call(write_count, model.get_submodule(path), attribute, int(number))
    for path, instead in identities.items():
        parent, _, key = path.rpartition(".")
        identity = replacement(model.get_submodule(path), checked(instead))
        change.put(model.get_submodule(parent)._modules, key, identity)
    change.apply()
    return model


def metadata_of(state_dict: Any) -> dict[str, dict[str, Any]]:
    """The metadata of a state dict: {name of a module: what it has saved}.

    Raises:
        CheckpointError: it is of another kind.
    """
    found = getattr(state_dict, "_metadata", None) or {}
    if not isinstance(found, Mapping) or not all(isinstance(one, Mapping) for one in found.values()):
        raise CheckpointError("the metadata of `state_dict` are not those of a module")
    return {str(name): dict(one) for name, one in found.items()}


def _checked(metadata: Any, model: nn.Module) -> dict[str, Any]:
    """Structure in the state dict of a model in training, after a check of names and types."""
    known = dict(model.named_modules())
    try:
        # Anything but a number of channels would change how a module works.
        fits = all(
            name in known and type(number) is int and number >= 0 and type(read_count(known[name], attribute)) is int
            for (name, attribute), number in metadata.get("attributes", {}).items()
        )
        for name, instead in metadata.get("identities", {}).items():
            fits = fits and bool(name) and name in known
            checked(instead)
    except (AttributeError, TypeError, ValueError):
        fits = False
    if not fits:
        raise CheckpointError(
            "`state_dict` names modules or numbers of channels that `model` has not; nothing was changed"
        )
    return dict(metadata)


def _removed(
    graph: ChannelGraph | None, persistent: Collection[str], state_dict: Mapping[str, Any]
) -> dict[str, Instead]:
    """The modules of removable layers of which the state dict has no tensor, and what takes their places."""
    layers = () if graph is None else graph.layers
    own = {layer: [key for key in persistent if layer.has(key)] for layer in layers}
    gone = [layer for layer, keys in own.items() if keys and not any(key in state_dict for key in keys)]
    return dict(modules_of(gone))


def _traced(graph: ChannelGraph, wanted: Mapping[str, Tensor]) -> dict[tuple[str, str], int]:
    """Counting attributes from the sizes of tensors with the same units, of which each may have several entries."""
    group = graph.costs.unit_group
    sizes = torch.bincount(group)

    def entries(axis: int) -> tuple[int, dict[int, float]]:
        """The number of entries of an axis that are always there, and {group: entries per unit} for the others."""
        units = graph.units_along(axis)
        each = torch.bincount(group[units[units >= 0]], minlength=len(sizes)) / sizes
        return int((units < 0).sum()), {int(g): float(each[g]) for g in each.nonzero()}

    kept: dict[int, float] = {}
    for name, pieces in graph.tensors.items():
        for piece in pieces if name in wanted else ():
            fixed, each = entries(piece.axis)
            if len(each) == 1:
                ((g, per_unit),) = each.items()
                kept[g] = (wanted[name].shape[piece.dim] - fixed) / per_unit
    found = {}
    for owner, counter in graph.attributes.items():
        fixed, each = entries(counter.axis)
        if each.keys() <= kept.keys():
            count = fixed + sum(per_unit * kept[g] for g, per_unit in each.items())
            found[owner] = counter.dense - (graph.axes[counter.axis].numel() - round(count))
    return found


def _layer_attributes(
    path: str, module: nn.Module, shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, int | tuple[int, ...]]]:
    """Counting attributes of PyTorch's own layers, from the shape of their weight."""
    prefix = f"{path}." if path else ""
    weight = shapes.get(f"{prefix}weight", shapes.get(f"{prefix}running_mean"))
    if weight is None:
        return
    if isinstance(module, _ConvNd):
        filters, others = (weight[1], weight[0]) if module.transposed else (weight[0], weight[1])
        dense_filters = module.out_channels // module.groups if module.transposed else module.out_channels
        groups = module.groups
        if groups > 1:  # whole kernel groups are removed: the others have as many channels as before
            groups = others * groups // module.in_channels if module.transposed else filters * groups // dense_filters
        yield "groups", groups
        yield "out_channels", filters * groups if module.transposed else filters
        yield "in_channels", others if module.transposed else others * groups
    elif isinstance(module, nn.Linear):
        yield "out_features", weight[0]
        yield "in_features", weight[1]
    elif isinstance(module, nn.Embedding):
        yield "num_embeddings", weight[0]
        yield "embedding_dim", weight[1]
    elif isinstance(module, nn.GroupNorm):
        yield "num_groups", weight[0] * module.num_groups // module.num_channels
        yield "num_channels", weight[0]
    elif isinstance(module, _NormBase):
        yield "num_features", weight[0]
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        yield "normalized_shape", tuple(weight)
    elif isinstance(module, nn.PReLU):
        yield "num_parameters", weight[0]

"""A slow, obvious masked dense network: the user's own dense module, with hooks that set dropped channels to zero.

Nothing here uses slimstart's slices, axes or ports. `Live` says for one layer which channels it reads and which it
writes. It is written by hand in the tests, or found by `liveness`: the forward of the network is run with layers
that propagate ones and zeros instead of values. A filter writes ones where the mask keeps its unit; a layer within
channels (normalisation, depthwise convolution) keeps the channels that reach it; sums, concatenations and reshapes
are those of the forward itself.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from tests.zoo import call, cast, tensors


class Live(NamedTuple):
    """Bool vectors over a layer's input and output channels; None: all of them, always."""

    inputs: Tensor | None
    outputs: Tensor | None


def live(size: tuple[int, int], inputs: Sequence[int] | None, outputs: Sequence[int] | None) -> Live:
    """A layer of this size, with the listed inputs and outputs."""

    def vector(length: int, kept: Sequence[int] | None) -> Tensor | None:
        return None if kept is None else torch.tensor([i in kept for i in range(length)])

    return Live(vector(size[0], inputs), vector(size[1], outputs))


# --- kinds of layers -------------------------------------------------------------------------------------------------


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, _ConvNd) and layer.groups == layer.in_channels > 1


def _within_channels(layer: nn.Module) -> bool:
    if isinstance(layer, nn.GroupNorm):
        return layer.num_groups > 1
    if isinstance(layer, nn.PReLU):
        return layer.num_parameters > 1
    return isinstance(layer, _BatchNorm | _InstanceNorm) or _is_depthwise(layer)


def _over_channels(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LayerNorm | nn.RMSNorm) or (isinstance(layer, nn.GroupNorm) and layer.num_groups == 1)


def _writes(layer: nn.Module) -> bool:
    return isinstance(layer, _ConvNd | nn.Linear | nn.Embedding) and not _is_depthwise(layer)


def _channel_dim(layer: nn.Module, tensor: Tensor) -> int:
    if isinstance(layer, _ConvNd):
        return tensor.dim() - layer.weight.dim() + 1
    return tensor.dim() - 1 if isinstance(layer, nn.Linear | nn.Embedding) else 1


def _along(vector: Tensor, layer: nn.Module, tensor: Tensor) -> Tensor:
    """The vector in a shape that multiplies the channels of the tensor."""
    shape = [1] * tensor.dim()
    shape[_channel_dim(layer, tensor)] = -1
    return vector.to(tensor.dtype).view(shape)


# --- which channels are live -----------------------------------------------------------------------------------------


class _OnesStayOnes(TorchFunctionMode):
    """Of ones and zeros we want to know only which is which, so nothing may turn one into the other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("sigmoid", "sigmoid_", "hardsigmoid", "softplus"):
            return args[0]
        # A difference of two live channels is live; one of whole numbers is arithmetic on positions.
        if name == "sub" and all(isinstance(one, Tensor) and one.is_floating_point() for one in args[:2]):
            return args[0] + args[1]
        return func(*args, **(kwargs or {}))


def liveness(model: nn.Module, example_inputs: Any, filters: Mapping[str, Tensor], mask: Tensor) -> dict[str, Live]:
    """Which channels every layer reads and writes, by running the network on ones and zeros.

    Args:
        filters: for every layer that writes new channels, the unit of each of its filters (-1: always kept).
        mask: which units are kept, with at least one in every group.
    """
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(1.0)
    kept = torch.cat([mask.bool(), torch.ones(1, dtype=torch.bool)])  # unit -1 is the last
    found: dict[str, Live] = {}

    def after(name: str, layer: nn.Module, args: Any, result: Tensor) -> Tensor:
        (x,) = args
        reads = None
        if not isinstance(layer, nn.Embedding):
            channel = _channel_dim(layer, x)
            reads = (x != 0).transpose(0, channel).flatten(1).any(1)
        if _over_channels(layer):
            return torch.ones_like(result)
        if _writes(layer):
            size = result.shape[_channel_dim(layer, result)]
            writes = kept[filters[name]] if name in filters else torch.ones(size, dtype=torch.bool)
        else:
            assert reads is not None
            writes = reads.repeat_interleave(result.shape[1] // len(reads))
        if name in found:  # a layer that is called again must find the same channels, having one set of weights
            for before, now in zip(found[name], (reads, writes), strict=True):
                assert before is now is None or torch.equal(before, now), f"{name} is called with other channels"
        found[name] = Live(reads, writes)
        return _along(writes, layer, result).expand_as(result).clone()

    for name, layer in twin.named_modules():
        if _writes(layer) or _within_channels(layer) or _over_channels(layer):
            layer.register_forward_hook(lambda *a, name=name: after(name, *a))
    ones = cast(example_inputs, torch.float64)
    for tensor in tensors(ones):
        if tensor.is_floating_point():
            tensor.fill_(1.0)
    with torch.no_grad(), _OnesStayOnes():
        for training in (True, False):  # auxiliary heads run in one of them only
            call(twin.train(training), copy.deepcopy(ones))
    return found


# --- the masked network, and what a narrow one must hold -------------------------------------------------------------


def masked(model: nn.Module, live: Mapping[str, Live]) -> nn.Module:
    """A dense copy in which channels that are not live are zero where a layer reads and where it writes them."""
    twin = copy.deepcopy(model)

    def before(layer: nn.Module, args: Any, vector: Tensor) -> Any:
        return (args[0] * _along(vector, layer, args[0]), *args[1:])

    for name, (inputs, outputs) in live.items():
        layer = twin.get_submodule(name)
        if inputs is not None:
            layer.register_forward_pre_hook(lambda layer, args, vector=inputs: before(layer, args, vector))
        if outputs is not None:
            layer.register_forward_hook(lambda layer, args, y, vector=outputs: y * _along(vector, layer, y))
    return twin


def kept_indices(model: nn.Module, live: Mapping[str, Live], name: str) -> list[Tensor]:
    """For every dimension of a named parameter or buffer, the indices that a narrow network holds."""
    module, _, kind = name.rpartition(".")
    tensor = operator.attrgetter(name)(model)
    whole = [torch.arange(size) for size in tensor.shape]
    if module not in live or tensor.dim() == 0:
        return whole
    layer, (inputs, outputs) = model.get_submodule(module), live[module]
    if kind != "weight" or not _writes(layer):
        dims = [outputs]
    elif isinstance(layer, nn.Embedding):
        dims = [None, outputs]
    elif isinstance(layer, _ConvNd) and layer.groups > 1:  # kernel groups go as wholes
        dims = [outputs]
    else:
        dims = [inputs, outputs] if isinstance(layer, _ConvTransposeNd) else [outputs, inputs]
    return [
        every if dim >= len(dims) or dims[dim] is None else dims[dim].nonzero().squeeze(1)
        for dim, every in enumerate(whole)
    ]


def cut(model: nn.Module, live: Mapping[str, Live], name: str, tensor: Tensor) -> Tensor:
    """The entries of a dense tensor (a weight, a gradient, a momentum) that a narrow network holds."""
    for dim, indices in enumerate(kept_indices(model, live, name)):
        tensor = tensor.index_select(dim, indices)
    return tensor


def kept_entries(model: nn.Module, live: Mapping[str, Live], name: str) -> Tensor:
    """Bool tensor of the dense shape: which entries a narrow network holds."""
    indices = kept_indices(model, live, name)
    entries = torch.zeros(operator.attrgetter(name)(model).shape, dtype=torch.bool)
    entries[torch.meshgrid(*indices, indexing="ij") if indices else ...] = True
    return entries

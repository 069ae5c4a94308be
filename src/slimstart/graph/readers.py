"""The layers that read a unit: convolutions and linear layers, and along which dimension of their weight.

Depthwise convolutions and normalisations are not listed, because they are dropped with the unit; neither are weights
that the user's forward uses in other ways. Only for stream coupling, where a channel has one unit for all its readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from slimstart.graph.channels import ChannelGraph

LAYERS = (nn.Linear, _ConvNd)  # that mix channels


@dataclass(frozen=True, eq=False)
class Reader:
    """A weight that mixes channels.

    Attributes:
        layer: the name of the module that owns it.
        weight: its own name.
        dim: the dimension of its input channels.
        axis: the graph's axis of this dimension.
        units: (n,) int64, the unit of each input channel; -1: always there.
        length: the name of the lengths, if the weight is a direction under weight norm.
    """

    layer: str
    weight: str
    dim: int
    axis: int
    units: Tensor
    length: str | None = None


def readers(graph: ChannelGraph, model: nn.Module) -> list[Reader]:
    """All weights that mix prunable channels, in the order of the model.

    Args:
        graph: traced with stream coupling.
        model: the model that was traced.
    """
    if graph.coupling != "stream":
        raise ValueError(
            f"`graph` has coupling {graph.coupling!r}; a channel has one unit only with 'stream': trace the model with "
            "`coupling='stream'`"
        )
    return list(_found(graph, model))


def functional_readers(graph: ChannelGraph, model: nn.Module) -> list[Reader]:
    """Weights of other modules than Linear and Conv layers, which mix prunable channels and do nothing else."""
    modules = dict(model.named_modules())
    return [
        Reader(name.rpartition(".")[0], name, dim, piece.axis, graph.units_along(piece.axis), _length(model, name))
        for name, dim in graph.weights.items()
        if not isinstance(modules[name.rpartition(".")[0]], LAYERS)
        for piece in graph.tensors.get(name, ())
        if piece.dim == dim
    ]


def _length(model: nn.Module, name: str) -> str | None:
    """The name of the lengths that belong to a direction under weight norm."""
    place, _, own = name.rpartition(".")
    steps = model.get_submodule(place)
    normed = isinstance(steps, ParametrizationList) and type(steps[0]).__name__ == "_WeightNorm"
    return f"{place}.original0" if normed and own == "original1" else None


def _found(graph: ChannelGraph, model: nn.Module) -> Iterator[Reader]:
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        if parameter.dim() < 2 or not isinstance(modules[layer], LAYERS):
            continue
        module = modules[layer]
        dim = 0 if isinstance(module, _ConvTransposeNd) else 1
        if isinstance(module, _ConvTransposeNd) and module.groups > 1:  # dropped with the unit, as depthwise ones are
            continue
        for piece in graph.tensors.get(name, ()):
            if piece.dim == dim:
                yield Reader(layer, name, dim, piece.axis, graph.units_along(piece.axis))

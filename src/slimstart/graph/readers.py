"""Who reads a unit: the layers that mix channels, and along which dimension of their weight.

A layer within channels (a depthwise convolution, a normalisation) reads nothing in this sense: it goes with the unit.
Convolutions and linear layers alone are listed: of weights that are used in other ways it is not known what they do.
Only for coupling by streams: there a channel has one unit, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from slimstart.graph.channels import ChannelGraph

LAYERS = (nn.Linear, _ConvNd)  # that mix channels


@dataclass(frozen=True, eq=False)
class Reader:
    """A weight that mixes channels.

    Attributes:
        layer: the name of the module that owns it.
        weight: its own name.
        dim: the dimension along which its input channels lie.
        axis: which of the graph's axes that is.
        units: (n,) int64, the unit of each of them; -1: always there.
    """

    layer: str
    weight: str
    dim: int
    axis: int
    units: Tensor


def readers(graph: ChannelGraph, model: nn.Module) -> list[Reader]:
    """All weights that mix channels which can go, in the order of the model.

    Args:
        model: from which the graph was traced.
    """
    if graph.coupling != "stream":
        raise ValueError(f"`graph` has coupling {graph.coupling!r}; a channel has one unit only with 'stream'")
    return list(_found(graph, model))


def _found(graph: ChannelGraph, model: nn.Module) -> Iterator[Reader]:
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        if parameter.dim() < 2 or not isinstance(modules[layer], LAYERS):
            continue
        dim = 0 if isinstance(modules[layer], _ConvTransposeNd) else 1
        for piece in graph.tensors.get(name, ()):
            if piece.dim == dim:
                yield Reader(layer, name, dim, piece.axis, graph.units_along(piece.axis))

"""The one thing that a narrow network has and the dense one has not: a layer on a stream that is wider than the layer.

Under filter coupling every filter has its own mask, also where several layers write into one residual stream. The
stream then carries the union of what its writers keep. A layer on it reads the channels that are live at its place and
writes its own among zeros:

    y = zeros(stream width);  y[write] = layer(x[read])

`StreamPort` is a mixin that adds just that around the forward of a PyTorch layer; parameters keep their names, and the
layer is still a `Conv2d`. `finish(..., plain=True)` does without, at the price of rows of zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class StreamPort(nn.Module):
    """Mixin in front of a layer class: read some channels of a stream, write some channels of one.

    Attributes:
        stream_read: indices of the channels that the layer reads, None for all.
        stream_write: where in the stream the layer's outputs go, None for everywhere.
        stream_width: channels of the stream written to.
        stream_dims: channel dimension of input and output, counted from the end.
    """

    stream_read: Tensor | None
    stream_write: Tensor | None
    stream_width: int
    stream_dims: tuple[int, int]

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.stream_read is not None:
            input = input.index_select(self.stream_dims[0], self.stream_read)
        y: Tensor = super().forward(input, *args, **kwargs)
        if self.stream_write is None:
            return y
        dim = y.dim() + self.stream_dims[1]
        stream = y.new_zeros([self.stream_width if d == dim else size for d, size in enumerate(y.shape)])
        return stream.index_copy(dim, self.stream_write, y)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made on the fly: pickle and deepcopy rebuild it from the layer's own.
        return _rebuild, (type(self).__mro__[2],), self.__dict__


_PORTED: dict[type[nn.Module], type[nn.Module]] = {}


def ported(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer with a port; the layer's own class is its base."""
    if layer not in _PORTED:
        _PORTED[layer] = type(f"Streamed{layer.__name__}", (StreamPort, layer), {"__module__": __name__})
    return _PORTED[layer]


def _rebuild(layer: type[nn.Module]) -> nn.Module:
    cls = ported(layer)
    return cls.__new__(cls)


def open_port(layer: nn.Module) -> None:
    """Give a layer a port, in place, that for now reads and writes everything."""
    layer.__class__ = ported(type(layer))
    layer.register_buffer("stream_read", None, persistent=False)
    layer.register_buffer("stream_write", None, persistent=False)
    layer.stream_width = 0  # type: ignore[assignment]
    layer.stream_dims = (0, 0)  # type: ignore[assignment]


def set_port(layer: nn.Module, read: Tensor | None, write: Tensor | None, width: int, dims: tuple[int, int]) -> None:
    """Point the port of a layer at channels of the streams around it."""
    device = next((t.device for t in layer.parameters(recurse=False)), torch.device("cpu"))
    layer.stream_read = None if read is None else read.to(device)  # type: ignore[assignment]
    layer.stream_write = None if write is None else write.to(device)  # type: ignore[assignment]
    layer.stream_width = width  # type: ignore[assignment]
    layer.stream_dims = dims  # type: ignore[assignment]


def close_port(layer: nn.Module) -> None:
    """Take the port away again, in place."""
    if isinstance(layer, StreamPort):
        for name in ("stream_read", "stream_write"):
            layer._buffers.pop(name)
            layer._non_persistent_buffers_set.discard(name)
        for name in ("stream_width", "stream_dims"):
            layer.__dict__.pop(name)
        layer.__class__ = type(layer).__mro__[2]

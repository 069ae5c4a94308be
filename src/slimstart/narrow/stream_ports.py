"""Ports: the one part of a narrow network that the dense one does not have, for layers narrower than their stream.

Under filter coupling every filter has its own mask, also where several layers write into one residual stream. The
stream then has the union of the channels that its writers keep. A layer reads the channels that are live where it is,
and writes its own among zeros:

    y = zeros(stream width);  y[write] = layer(x[read])

`StreamPort` is a mixin that adds this around the forward of a PyTorch layer; parameters keep their names, and the layer
is still a `Conv2d`. `finish(..., plain=True)` removes ports, and layers get rows of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.kernels import take_channels

Dims = tuple[int, int]
BUFFERS = ("stream_read", "stream_write", "stream_read_back", "stream_write_back")
PORT = "slimstart_port"
"""The key under which the metadata of a state dict have the `positions` of a layer."""


@dataclass(frozen=True)
class Side:
    """One side of a port.

    Attributes:
        index: for every channel of the layer, its position in the stream; -1 for padding.
        back: for every channel of the stream, its position in the layer, or -1. Needed if there is padding.
    """

    index: Tensor
    back: Tensor | None = None


class StreamPort(nn.Module):
    """Mixin in front of a layer class: read some channels of a stream, write some channels of one.

    Attributes:
        stream_read: indices of the channels that the layer reads, None for all.
        stream_write: positions of the layer's outputs in the stream, None for all.
        stream_read_back, stream_write_back: for every channel of the stream, which of the layer's it is, or -1. With
            them, indices may be -1 too (padding, which reads nothing and writes nothing), and a GPU needs one
            kernel each way; without them, plain operations that every exporter knows do the work.
        stream_positions: `positions` of these indices; None with padding.
        stream_width: channels of the stream written to.
        stream_dims: channel dimension of input and output, counted from the end.
    """

    stream_read: Tensor | None
    stream_write: Tensor | None
    stream_read_back: Tensor | None
    stream_write_back: Tensor | None
    stream_positions: list[list[int] | None] | None = None
    stream_width: int
    stream_dims: tuple[int, int]

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        on_gpu = input.is_cuda and not torch.compiler.is_compiling()
        if self.stream_read is not None:
            if self.stream_read_back is None and on_gpu:
                self.stream_read_back = backwards(self.stream_read, input.shape[self.stream_dims[0]])
            if self.stream_read_back is None:
                input = input.index_select(self.stream_dims[0], self.stream_read)
            else:
                input = take_channels(input, self.stream_read, self.stream_read_back, self.stream_dims[0])
        y: Tensor = super().forward(input, *args, **kwargs)
        if self.stream_write is None:
            return y
        if self.stream_write_back is None and on_gpu:
            self.stream_write_back = backwards(self.stream_write, self.stream_width)
        if self.stream_write_back is not None:
            return take_channels(y, self.stream_write_back, self.stream_write, self.stream_dims[1])
        dim = y.dim() + self.stream_dims[1]
        stream = y.new_zeros([self.stream_width if d == dim else size for d, size in enumerate(y.shape)])
        return stream.index_copy(dim, self.stream_write, y)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][PORT] = self.stream_positions

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        saved, own = local_metadata.get(PORT), self.stream_positions
        if saved is not None and own is not None and saved != own:  # the shapes may be the same
            more[-1].append(f"{prefix[:-1]} is of a network in which this layer reads or writes other channels")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created at run time: pickle and deepcopy rebuild it from the layer's own class.
        return _rebuild, (type(self).__mro__[2],), self.__getstate__()  # type: ignore[no-untyped-call]


_PORTED: dict[type[nn.Module], type[nn.Module]] = {}


def ported(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer with a port; the layer's own class is its base."""
    if layer not in _PORTED:
        _PORTED[layer] = type(f"Streamed{layer.__name__}", (StreamPort, layer), {"__module__": __name__})
    return _PORTED[layer]


def _rebuild(layer: type[nn.Module]) -> nn.Module:
    cls = ported(layer)
    return cls.__new__(cls)


def set_port(layer: nn.Module, read: Side | None, write: Side | None, width: int, dims: Dims) -> None:
    """Set which channels of the streams around it a layer reads and writes, in place; None for all."""
    if not isinstance(layer, StreamPort):
        for name in BUFFERS:
            layer.register_buffer(name, None, persistent=False)
        layer.__class__ = ported(type(layer))  # last: whatever is interrupted here is called again
    device = next((t.device for t in layer.parameters(recurse=False)), torch.device("cpu"))
    for name, side in (("stream_read", read), ("stream_write", write)):
        index, back = (side.index, side.back) if side is not None else (None, None)
        setattr(layer, name, None if index is None else index.to(device))
        setattr(layer, f"{name}_back", None if back is None else back.to(device))
    padded = any(side is not None and side.back is not None for side in (read, write))
    layer.stream_positions = None if padded else positions(read, write)  # type: ignore[assignment]
    layer.stream_width = width  # type: ignore[assignment]
    layer.stream_dims = dims  # type: ignore[assignment]


def positions(read: Side | None, write: Side | None) -> list[list[int] | None]:
    """The indices of both sides as numbers; None for all channels."""
    return [None if side is None else side.index.tolist() for side in (read, write)]


def backwards(index: Tensor, width: int) -> Tensor:
    """For every channel of a stream of this width, its position in `index`, or -1."""
    return index.new_full((width,), -1).index_copy(0, index, torch.arange(index.numel(), device=index.device))


def close_port(layer: nn.Module) -> None:
    """Remove the port of a layer, in place."""
    if isinstance(layer, StreamPort):
        for name in BUFFERS:
            layer._buffers.pop(name)
            layer._non_persistent_buffers_set.discard(name)
        for name in ("stream_positions", "stream_width", "stream_dims"):
            layer.__dict__.pop(name)
        layer.__class__ = type(layer).__mro__[2]

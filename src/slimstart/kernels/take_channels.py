"""Selection of channels of an activation, in one pass forward and one pass backward.

The backward of `index_select` adds with atomics, and its result is not channels-last. The inverse of a selection is
known beforehand; with it both directions are the same gather.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimstart.kernels.backend import use_triton

# A program of the kernel moves ROWS x COLUMNS elements. Rows of the tensor are concatenated until they fill CHUNKS
# times COLUMNS, so that few lanes idle for any number of channels.
ROWS, COLUMNS, CHUNKS = 16, 1024, 8

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take_channels(x: Tensor, index: Tensor, inverse: Tensor, dim: int) -> Tensor:
    """y[..., i, ...] = x[..., index[i], ...] along `dim`, and 0 where index[i] is -1; differentiable in x.

    Args:
        x: activation of any floating type; y has its type and its memory format.
        index: int32 or int64, one entry per channel of y, on the device of x; no channel twice.
        inverse: one entry per channel of x, with inverse[index[i]] = i, and -1 for channels that are not in y.
        dim: dimension of the channels, counted from the end, so negative.
    """
    if not -x.dim() <= dim < 0:
        raise ValueError(f"`dim` is {dim}; it must be from {-x.dim()} to -1 for `x` of shape {tuple(x.shape)}")
    if index.dim() != 1 or inverse.shape != (x.shape[dim],):
        raise ValueError(
            f"`index` has shape {tuple(index.shape)} and `inverse` {tuple(inverse.shape)}; they must have one entry "
            f"for each channel of the result and for each of the {x.shape[dim]} channels of `x`"
        )
    y: Tensor = _TakeChannels.apply(x, index, inverse, dim)  # type: ignore[no-untyped-call]
    return y


class _TakeChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.dim = dim
        return _take(x, index, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _take(grads[0], inverse, ctx.dim), None, None, None


def _take(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """The gather, on x in its memory order: rows of channels of contiguous pixels."""
    order = list(range(x.dim()))
    channels_last = _is_channels_last(x)
    if channels_last:
        order.append(order.pop(1))
    axis = order.index(x.dim() + dim)
    x = x.permute(order).contiguous()
    outer, inner = x.shape[:axis], x.shape[axis + 1 :]
    rows, pixels = math.prod(outer), math.prod(inner)
    # Allocated with its final strides: autograd forbids in-place operations on a view that is made in here.
    shape = torch.empty(*outer, index.numel(), *inner, device="meta").permute([order.index(d) for d in range(x.dim())])
    y = x.new_empty_strided(shape.shape, shape.stride())
    # The kernel counts the elements of a row in 32 bits.
    take = _take_by_triton if use_triton(x) and index.numel() * pixels < 2**30 else _take_by_torch
    take(y.permute(order).view(rows, index.numel(), pixels), x.view(rows, x.shape[axis], pixels), index)
    return y


def _is_channels_last(x: Tensor) -> bool:
    """Whether the strides are channels-last; with one channel or one pixel, memory is the same in both formats."""
    return x.dim() in (4, 5) and x.stride(1) == 1 and x.stride(-1) == x.shape[1] and x.movedim(1, -1).is_contiguous()


def _take_by_torch(y: Tensor, x: Tensor, index: Tensor) -> None:
    there = index.clamp(min=0).long()
    if x.shape[2] == 1:  # along the last dimension, `gather` is several times faster on a CPU
        torch.gather(x.squeeze(2), 1, there.expand(x.shape[0], -1), out=y.squeeze(2))
    else:
        torch.index_select(x, 1, there, out=y)
    # Zeros by a bitwise and: a product would keep NaN, and `masked_fill` takes longer than the gather.
    bits = _INTEGERS[x.element_size()]
    y.view(bits).bitwise_and_((index >= 0).to(bits).neg().unsqueeze(1))


def _take_by_triton(y: Tensor, x: Tensor, index: Tensor) -> None:
    from slimstart.kernels import take_channels_triton as channels_triton

    num_rows, width, pixels = x.shape
    x_row, y_row = width * pixels, index.numel() * pixels
    if y.numel() == 0:
        return
    stack = -(-CHUNKS * COLUMNS // y_row)
    num_chunks = -(-stack * y_row // COLUMNS)
    num_tiles = -(-num_rows // (stack * ROWS))
    with torch.cuda.device_of(x):
        channels_triton.take[(num_tiles * num_chunks,)](
            y, x, index, y.numel(), stack, x_row, y_row, pixels, num_chunks, num_tiles, ROWS, COLUMNS
        )

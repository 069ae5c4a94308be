r"""Depthwise convolution with one kernel for all numbers of channels.

.. math:: y_{n c p} = b_c + \sum_t w_{c t} \, x_{n c, s p + d t - q}

with the stride s, the dilation d and the padding q. cuDNN compiles kernels for every new number of channels, which
takes more than half a second per layer, and learned widths are new in every layer after every structure update. Here
one compiled kernel serves all widths with the same largest power of two among their divisors, up to 8. Pixels are read
once per tap, all but the first time from a cache.

Sums are float32 for all types of x. Equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstart.kernels.backend import use_triton
from slimstart.kernels.tiles import DTYPES, MAX_ELEMENTS, multiprocessors, vector

MAX_TAPS = 9  # loops over taps are unrolled, and long ones take minutes to compile

# Pixels and channels of a tile; with wider ones, more lanes idle at the last channels.
TILE = {"BLOCK_P": 32, "BLOCK_C": 32, "num_warps": 2}
FILTER_TILE = {"BLOCK_P": 16, "BLOCK_C": 32, "num_warps": 1}  # smaller: every tap has its own sums in registers
# Programs per multiprocessor that share the sum over all pixels for the gradient of a filter; more where an image has
# more tiles.
PARTIALS = 8
FINISH = {"BLOCK_R": 256, "BLOCK_W": 16, "num_warps": 8}


class Window(NamedTuple):
    """Stride, padding and dilation of a convolution: (vertical, horizontal)."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, groups: int) -> bool:
    """Whether a convolution is depthwise and has kernels, provided that its tensors are cast to one type."""
    return (
        use_triton(x)
        and x.dim() == 4
        and x.dtype in DTYPES
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.dim() == 4
        and groups == x.shape[1] == weight.shape[0] > 1
        and weight.shape[1] == 1
        and weight.shape[2:].numel() <= MAX_TAPS
        and (bias is None or bias.shape == weight.shape[:1])
        and min(*window.stride, *window.dilation) > 0
        and min(window.padding) >= 0
        and all(t is None or (t.dtype in DTYPES and t.device == x.device) for t in (weight, bias))
        and max(x.numel(), x.shape[0] * x.shape[1] * _area(x, weight, window)) <= MAX_ELEMENTS
        and x.numel() > 0
        and _area(x, weight, window) > 0
    )


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """The convolution of x (N, C, H, W) with weight (C, 1, K, L), the equation in the module's docstring."""
    groups, one_type = x.shape[1], len({t.dtype for t in (x, weight, bias) if t is not None}) == 1
    if one_type and supports(x, weight, bias, window, groups):
        out: Tensor = _DepthwiseConv2d.apply(x, weight, bias, window)  # type: ignore[no-untyped-call]
        return out
    return F.conv2d(x, weight, bias, window.stride, window.padding, window.dilation, groups)


class _DepthwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        from slimstart.kernels import depthwise_triton as kernels

        y = torch.empty(
            (*x.shape[:2], *_output(x, weight, window)),
            dtype=x.dtype,
            device=x.device,
            memory_format=torch.channels_last,
        )
        filters = weight.flatten(1).t().contiguous()  # (T, C), like the pixels
        bias = None if bias is None else bias.contiguous()
        with torch.cuda.device_of(x):
            kernels.forward[_grid(y, TILE)](x, filters, bias, y, **_settings(x, y, weight, window), **TILE)
        ctx.save_for_backward(x, weight, filters)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, filters = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a second derivative, which torch's own backward has
            sizes, rest = [len(weight)], (False, (0, 0), len(weight), needed)
            return *torch.ops.aten.convolution_backward(dy, x, weight, sizes, *ctx.window, *rest), None

        from slimstart.kernels import depthwise_triton as kernels

        # Saved tensors too: a hook on them (offloading, for example) may return another layout.
        x, dy = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, dy))
        dx = d_weight = None
        settings = _settings(x, dy, weight, ctx.window)
        with torch.cuda.device_of(x):
            if needed[0]:
                dx = torch.empty_like(x)
                kernels.backward[_grid(x, TILE)](dy, filters.contiguous(), dx, **settings, **TILE)
            if needed[1]:
                d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
                columns = weight.numel()
                grid, shares = _shares(dy)
                partial = torch.empty(grid[0] * grid[2], columns, dtype=torch.float32, device=x.device)
                kernels.backward_filter[grid](dy, x, partial, **shares, **settings, **FILTER_TILE)
                kernels.backward_finish[(-(-columns // FINISH["BLOCK_W"]),)](
                    partial, d_weight, len(partial), columns, len(weight), **FINISH
                )
        d_bias = dy.sum((0, 2, 3), dtype=torch.float32).to(dy.dtype) if needed[2] else None
        return dx, d_weight, d_bias, None


def _output(x: Tensor, weight: Tensor, window: Window) -> list[int]:
    """Height and width of the result."""
    return [
        (length + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        for length, taps, stride, padding, dilation in zip(x.shape[2:], weight.shape[2:], *window, strict=True)
    ]


def _area(x: Tensor, weight: Tensor, window: Window) -> int:
    height, width = _output(x, weight, window)
    return height * width if min(height, width) > 0 else 0


def _grid(t: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    """Tiles of pixels and of channels."""
    return -(-(t.numel() // t.shape[1]) // tile["BLOCK_P"]), -(-t.shape[1] // tile["BLOCK_C"])


def _shares(dy: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Grid of the programs that share a sum over pixels (tiles of pixels, tiles of channels, images), and its sizes."""
    area, pixels, (_, blocks) = dy.shape[2] * dy.shape[3], FILTER_TILE["BLOCK_P"], _grid(dy, FILTER_TILE)
    at_once = max(1, min(pixels // area, len(dy)))  # images whose pixels fit into one tile
    tiles, rounds = -(-at_once * area // pixels), -(-len(dy) // at_once)
    per_program = -(-rounds * tiles * blocks // (PARTIALS * multiprocessors(dy)))
    return (tiles, blocks, -(-rounds // per_program)), {"images": per_program * at_once, "at_once": at_once}


def _settings(x: Tensor, y: Tensor, weight: Tensor, window: Window) -> dict[str, Any]:
    """Sizes and window, for all kernels but the last."""
    (count, channels, height, width), (out_height, out_width) = x.shape, y.shape[2:]
    vec = vector(channels)
    return {
        "count": count,
        "chunks": channels // vec,
        "height": height,
        "width": width,
        "out_height": out_height,
        "out_width": out_width,
        **{name.upper(): pair for name, pair in window._asdict().items()},
        "TAPS": tuple(weight.shape[2:]),
        "VEC": vec,
    }

r"""Batch normalisation in training, fused with the sum and the ReLU that follow it.

.. math:: y = \mathrm{relu}\left( \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \, w + b + r \right)

with the mean and the variance of each channel of x; the residual r and the ReLU are optional. A narrow network spends
most of its time on the memory traffic of these operations and on kernel launches. Here x is read twice and y written
once; backward reads the gradient and x twice and writes the gradient of x once. Small tensors take one kernel in each
direction, others three.

Arithmetic and statistics are float32 for all types of x. Equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimstart.kernels.backend import use_triton
from slimstart.kernels.tiles import DTYPES, MAX_ELEMENTS, multiprocessors, vector

MAX_CHANNELS = 2048

# Most rows of a tensor for which one kernel does everything: its programs own a few channels and read all rows.
SMALL_ROWS = 1024
SMALL_TILE = (1024, 16, 16)  # rows, channels, warps
# Elements of a tile of a larger tensor, and warps of a program.
TILE, WARPS = 4096, 8
# (Programs per multiprocessor, stages of the loop over tiles). Registers limit the programs: sums need more of them, so
# they get fewer programs, and hide the latency of memory by loading ahead instead.
SUMS, APPLY = (2, 3), (4, 1)


def supports(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> bool:
    """Whether `batch_norm_act` has kernels for these tensors; for others it calls torch."""
    return (
        use_triton(x)
        and x.dim() == 4
        and x.dtype in DTYPES
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.shape[1] <= MAX_CHANNELS
        and x.shape[1] < x.numel() <= MAX_ELEMENTS  # more than one value per channel
        and (residual is None or _alike(x, residual))
        and (running_mean is None) == (running_var is None)
        and all(
            p is None or (p.dtype == torch.float32 and p.device == x.device and p.is_contiguous())
            for p in (weight, bias, running_mean, running_var)
        )
    )


def batch_norm_act(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> Tensor:
    """relu(batch_norm(x) + residual), the equation in the module's docstring.

    Args:
        x: input.
        residual: tensor of the shape of x, or None.
        weight: scale of each channel, or None.
        bias: shift of each channel, or None.
        running_mean: running mean, updated in place, or None.
        running_var: running unbiased variance, updated in place, or None.
        momentum: weight of this batch in the running statistics.
        eps: term added to the variance.
        relu: whether a ReLU follows.
    """
    if supports(x, residual, weight, bias, running_mean, running_var):
        out: Tensor = _BatchNormAct.apply(x, residual, weight, bias, running_mean, running_var, momentum, eps, relu)  # type: ignore[no-untyped-call]
        return out
    out = F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    out = out if residual is None else out + residual
    return F.relu(out) if relu else out


def _alike(x: Tensor, other: Tensor) -> bool:
    return (
        x.shape == other.shape
        and x.dtype == other.dtype
        and x.device == other.device
        and other.is_contiguous(memory_format=torch.channels_last)
    )


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        from slimstart.kernels import norm_triton as kernels

        y, channels = torch.empty_like(x), x.shape[1]
        mean, rstd = torch.empty(2, channels, dtype=torch.float32, device=x.device)
        affine, running = (mean, rstd, weight, bias), (running_mean, running_var)
        with torch.cuda.device_of(x):
            if _num_rows(x) <= SMALL_ROWS:
                kernels.forward_small[_small_grid(x)](
                    x, residual, y, *affine, *running, **_small(x), momentum=momentum, eps=eps, RELU=relu
                )
            else:
                (programs, sums), (apply_programs, apply) = _tiles(x, *SUMS), _tiles(x, *APPLY)
                partial = torch.empty(2, programs, channels, dtype=torch.float32, device=x.device)
                kernels.forward_sums[(programs,)](x, partial, **sums)
                kernels.forward_finish[(-(-channels // kernels.FINISH_C.value),)](
                    x, partial, mean, rstd, *running, channels, programs, _num_rows(x), momentum, eps, num_warps=8
                )
                kernels.forward_apply[(apply_programs,)](x, residual, y, *affine, RELU=relu, **apply)
        # With a residual, the sign of y cannot be computed from x. Saving y is free: the next layer saves it too.
        ctx.save_for_backward(x, y if relu and residual is not None else None, weight, bias, mean, rstd)
        ctx.relu, ctx.has_residual = relu, residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from slimstart.kernels import norm_triton as kernels

        x, y, weight, bias, mean, rstd = ctx.saved_tensors
        # Saved tensors too: a hook on them (offloading, for example) may return another layout.
        x, dy = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, dy))
        y = None if y is None else y.contiguous(memory_format=torch.channels_last)
        dx, channels = torch.empty_like(x), x.shape[1]
        d_residual = torch.empty_like(x) if y is not None else None
        d_weight, d_bias = torch.empty(2, channels, dtype=torch.float32, device=x.device)
        affine = (mean, rstd, weight, bias)
        with torch.cuda.device_of(x):
            if _num_rows(x) <= SMALL_ROWS:
                kernels.backward_small[_small_grid(x)](
                    dy, x, y, dx, d_residual, *affine, d_weight, d_bias, **_small(x), RELU=ctx.relu
                )
            else:
                (programs, sums), (apply_programs, apply) = _tiles(x, *SUMS), _tiles(x, *APPLY)
                partial = torch.empty(2, programs, channels, dtype=torch.float32, device=x.device)
                kernels.backward_sums[(programs,)](dy, x, y, d_residual, *affine, partial, RELU=ctx.relu, **sums)
                kernels.backward_finish[(-(-channels // kernels.FINISH_C.value),)](
                    partial, rstd, d_weight, d_bias, channels, programs, num_warps=8
                )
                # The gradient of the residual is the masked gradient: with it, y need not be read again.
                masked, relu = (dy, ctx.relu) if d_residual is None else (d_residual, False)
                kernels.backward_apply[(apply_programs,)](
                    masked, x, dx, *affine, d_weight, d_bias, num_rows=_num_rows(x), RELU=relu, **apply
                )
        if ctx.has_residual and d_residual is None:
            d_residual = dy
        return (
            dx,
            d_residual,
            None if weight is None else d_weight,
            None if bias is None else d_bias,
            *(None,) * 5,
        )


def _num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _tiles(x: Tensor, per_multiprocessor: int, stages: int) -> tuple[int, dict[str, int]]:
    """The number of programs for a large tensor, and the sizes of its tiles, chosen so that few columns idle."""
    from slimstart.kernels.norm_triton import PARTIALS

    channels, vec = x.shape[1], vector(x.shape[1])
    columns = [c for c in (64, 128, 256, 512, 1024, 2048) if c >= channels]
    block = next((c for c in columns if c // channels * channels >= 0.85 * c), columns[-1])
    width, block_rows = block // channels * channels, TILE // block
    num_tiles = -(-x.numel() // (width * block_rows))
    return min(num_tiles, per_multiprocessor * multiprocessors(x), PARTIALS.value), {
        "channels": channels,
        "chunks": width // vec,
        "total_chunks": x.numel() // vec,
        "num_tiles": num_tiles,
        "VEC": vec,
        "BLOCK_R": block_rows,
        "BLOCK_W": block,
        "STAGES": stages,
        "num_warps": WARPS,
    }


def _small(x: Tensor) -> dict[str, int]:
    rows, block, warps = SMALL_TILE
    channels, vec = x.shape[1], vector(x.shape[1])
    return {
        "channels": channels,
        "chunks": channels // vec,
        "num_rows": _num_rows(x),
        "VEC": vec,
        "BLOCK_R": rows,
        "BLOCK_W": block,
        "num_warps": warps,
    }


def _small_grid(x: Tensor) -> tuple[int]:
    return (-(-x.shape[1] // SMALL_TILE[1]),)

# mypy: ignore-errors
"""Device code of `norm`: Triton's own language, which only looks like Python.

A channels-last tensor is P rows of C numbers in a row-major matrix. The kernels for large tensors read it as rows of
`width` = k C numbers, with the largest k that fits a tile of `BLOCK_W` columns: for every C loads are wide, addresses
are contiguous and few lanes idle. Column j belongs to channel j mod C. `VEC` divides C and is a constant, so that the
compiler can prove alignment and vectorise loads; sizes are passed divided by it (`chunks`), and multiplied here.

Sums over rows use one row of partial sums per program, added in a fixed order: no atomics, the same bits every time.
The variance is computed in one pass, as that of d = x - x[0], with the first row as a pivot: E[d^2] - E[d]^2 cancels
only if the first value is hundreds of standard deviations off the mean, which does not happen in batches of images.
"""

import triton
import triton.language as tl

# Most partial sums of one channel; number of channels that one program adds.
PARTIALS = tl.constexpr(512)
FINISH_C = tl.constexpr(8)

# Triton compiles further variants for sizes that are 1 or multiples of 16, and sizes change with every structure.
SIZES = ["channels", "chunks", "total_chunks", "num_tiles", "num_rows", "num_partials"]


@triton.jit
def _affine(mean, rstd, weight, bias, c, inside):
    """Mean of each channel, and (a, b) with bn(x) = a (x - mean) + b."""
    m = tl.load(mean + c, mask=inside, other=0.0)
    a = tl.load(rstd + c, mask=inside, other=0.0)
    if weight is not None:
        a *= tl.load(weight + c, mask=inside, other=0.0)
    b = tl.zeros_like(m)
    if bias is not None:
        b = tl.load(bias + c, mask=inside, other=0.0)
    return m, a, b


@triton.jit
def _activate(x, residual, y, at, inside, m, a, b, RELU: tl.constexpr):
    """Write relu(bn(x) + residual) at the given addresses."""
    value = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]) * a[None, :] + b[None, :]
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # maximum() would turn NaN into 0, unlike torch
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(dy, x, y, at, inside, m, a, b, RELU: tl.constexpr):
    """The gradient before the ReLU, and x - mean; y is None where the sign can be computed from x."""
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]
    if RELU:
        if y is None:
            out = d * a[None, :] + b[None, :]
        else:
            out = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(out <= 0, 0.0, g)
    return g, tl.where(inside, d, 0.0)


@triton.jit
def _finish_statistics(first, second, pivot, mean, rstd, running_mean, running_var, c, inside, count, momentum, eps):
    """Mean and 1 / standard deviation from the sums of d = x - pivot and of its square; updates running statistics."""
    shift = first / count
    var = tl.maximum(second / count - shift * shift, 0.0)
    m, r = pivot + shift, 1.0 / tl.sqrt(var + eps)
    tl.store(mean + c, m, mask=inside)
    tl.store(rstd + c, r, mask=inside)
    if running_mean is not None:
        old = tl.load(running_mean + c, mask=inside, other=0.0)
        tl.store(running_mean + c, (1 - momentum) * old + momentum * m, mask=inside)
        old = tl.load(running_var + c, mask=inside, other=0.0)
        tl.store(running_var + c, (1 - momentum) * old + momentum * var * (count / (count - 1)), mask=inside)
    return m, r


@triton.jit
def _tile(tile, width, total, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    """Addresses of one tile, and whether they are inside the tensor."""
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_W)
    at = row[:, None] * width + column[None, :]
    return at, (column < width)[None, :] & (at < total)


@triton.jit
def _store_partial(values, partial, channels, width, BLOCK_W: tl.constexpr):
    """Add the columns of each channel, and write this program's row of partial sums."""
    # The number of columns per channel is no constant, so a reshape is not possible: `gather` shifts by whole channels.
    c = tl.arange(0, BLOCK_W)
    folded = values
    for start in range(channels, width, channels):
        folded += tl.gather(values, tl.minimum(c + start, BLOCK_W - 1), 0)
    tl.store(partial + tl.program_id(0) * channels + c, folded, mask=c < channels)


@triton.jit
def _sum_partials(partial, num_partials, channels, c, inside):
    row = tl.arange(0, PARTIALS)
    at = row[:, None] * channels + c[None, :]
    return tl.sum(tl.load(partial + at, mask=(row < num_partials)[:, None] & inside[None, :], other=0.0), 0)


@triton.jit(do_not_specialize=SIZES)
def forward_sums(
    x, partial, channels, chunks, total_chunks, num_tiles,
    VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of d = x - x[0] and of its square."""
    width, total = chunks * VEC, total_chunks * VEC
    column = tl.arange(0, BLOCK_W)
    pivot = tl.load(x + column % channels).to(tl.float32)
    first = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    second = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        at, inside = _tile(tile, width, total, BLOCK_R, BLOCK_W)
        d = tl.where(inside, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - pivot[None, :], 0.0)
        first += d
        second += d * d
    _store_partial(tl.sum(first, 0), partial, channels, width, BLOCK_W)
    _store_partial(tl.sum(second, 0), partial + tl.num_programs(0) * channels, channels, width, BLOCK_W)


@triton.jit(do_not_specialize=SIZES)
def forward_finish(
    x, partial, mean, rstd, running_mean, running_var, channels, num_partials, num_rows, momentum, eps,
):  # fmt: skip
    """Statistics of a few channels from their partial sums."""
    c = tl.program_id(0) * FINISH_C + tl.arange(0, FINISH_C)
    inside = c < channels
    first = _sum_partials(partial, num_partials, channels, c, inside)
    second = _sum_partials(partial + num_partials * channels, num_partials, channels, c, inside)
    pivot = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    _finish_statistics(
        first, second, pivot, mean, rstd, running_mean, running_var, c, inside, num_rows.to(tl.float32), momentum, eps
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def forward_apply(
    x, residual, y, mean, rstd, weight, bias, channels, chunks, total_chunks, num_tiles,
    RELU: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = relu(bn(x) + residual), from the statistics."""
    width, total = chunks * VEC, total_chunks * VEC
    column = tl.arange(0, BLOCK_W)
    m, a, b = _affine(mean, rstd, weight, bias, column % channels, column < width)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        at, inside = _tile(tile, width, total, BLOCK_R, BLOCK_W)
        _activate(x, residual, y, at, inside, m, a, b, RELU)


@triton.jit(do_not_specialize=SIZES)
def forward_small(
    x, residual, y, mean, rstd, weight, bias, running_mean, running_var, channels, chunks, num_rows, momentum, eps,
    RELU: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The whole forward in one kernel: a program owns some channels and reads their few rows twice."""
    c = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    r = tl.arange(0, BLOCK_R)
    here = c < chunks * VEC
    pivot = tl.load(x + c, mask=here, other=0.0).to(tl.float32)
    first = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    second = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for row in range(0, num_rows, BLOCK_R):
        at, inside = (row + r)[:, None] * (chunks * VEC) + c[None, :], (row + r < num_rows)[:, None] & here[None, :]
        d = tl.where(inside, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - pivot[None, :], 0.0)
        first += d
        second += d * d
    m, a = _finish_statistics(
        tl.sum(first, 0), tl.sum(second, 0), pivot, mean, rstd, running_mean, running_var,
        c, here, num_rows.to(tl.float32), momentum, eps,
    )  # fmt: skip
    b = tl.zeros_like(m)
    if weight is not None:
        a *= tl.load(weight + c, mask=here, other=0.0)
    if bias is not None:
        b = tl.load(bias + c, mask=here, other=0.0)
    for row in range(0, num_rows, BLOCK_R):
        at, inside = (row + r)[:, None] * (chunks * VEC) + c[None, :], (row + r < num_rows)[:, None] & here[None, :]
        _activate(x, residual, y, at, inside, m, a, b, RELU)


@triton.jit(do_not_specialize=SIZES)
def backward_sums(
    dy, x, y, d_residual, mean, rstd, weight, bias, partial, channels, chunks, total_chunks, num_tiles,
    RELU: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of g and of g (x - mean), with g = dy masked by the ReLU; g is also the residual's gradient."""
    width, total = chunks * VEC, total_chunks * VEC
    column = tl.arange(0, BLOCK_W)
    m, a, b = _affine(mean, rstd, weight, bias, column % channels, column < width)
    first = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    second = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        at, inside = _tile(tile, width, total, BLOCK_R, BLOCK_W)
        g, d = _gradient(dy, x, y, at, inside, m, a, b, RELU)
        if d_residual is not None:
            tl.store(d_residual + at, g.to(d_residual.dtype.element_ty), mask=inside)
        first += g
        second += g * d
    _store_partial(tl.sum(first, 0), partial, channels, width, BLOCK_W)
    _store_partial(tl.sum(second, 0), partial + tl.num_programs(0) * channels, channels, width, BLOCK_W)


@triton.jit(do_not_specialize=SIZES)
def backward_finish(partial, rstd, d_weight, d_bias, channels, num_partials):
    """Gradients of weight and bias from the partial sums."""
    c = tl.program_id(0) * FINISH_C + tl.arange(0, FINISH_C)
    inside = c < channels
    first = _sum_partials(partial, num_partials, channels, c, inside)
    second = _sum_partials(partial + num_partials * channels, num_partials, channels, c, inside)
    tl.store(d_bias + c, first, mask=inside)
    tl.store(d_weight + c, second * tl.load(rstd + c, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def backward_apply(
    dy, x, dx, mean, rstd, weight, bias, d_weight, d_bias, channels, chunks, total_chunks, num_tiles, num_rows,
    RELU: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    r"""dx = a (g - mean of g - xhat * mean of (g xhat)), with xhat = (x - mean) rstd and a = weight rstd."""
    width, total = chunks * VEC, total_chunks * VEC
    column = tl.arange(0, BLOCK_W)
    c, here = column % channels, column < width
    m, a, b = _affine(mean, rstd, weight, bias, c, here)
    count = num_rows.to(tl.float32)
    constant = tl.load(d_bias + c, mask=here, other=0.0) / count
    slope = tl.load(rstd + c, mask=here, other=0.0) * tl.load(d_weight + c, mask=here, other=0.0) / count
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        at, inside = _tile(tile, width, total, BLOCK_R, BLOCK_W)
        g, d = _gradient(dy, x, None, at, inside, m, a, b, RELU)
        value = a[None, :] * (g - constant[None, :] - d * slope[None, :])
        tl.store(dx + at, value.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def backward_small(
    dy, x, y, dx, d_residual, mean, rstd, weight, bias, d_weight, d_bias, channels, chunks, num_rows,
    RELU: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The whole backward in one kernel, as in `forward_small`."""
    c = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    r = tl.arange(0, BLOCK_R)
    here = c < chunks * VEC
    m, a, b = _affine(mean, rstd, weight, bias, c, here)
    first = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    second = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for row in range(0, num_rows, BLOCK_R):
        at, inside = (row + r)[:, None] * (chunks * VEC) + c[None, :], (row + r < num_rows)[:, None] & here[None, :]
        g, d = _gradient(dy, x, y, at, inside, m, a, b, RELU)
        first += g
        second += g * d
    scale, count = tl.load(rstd + c, mask=here, other=0.0), num_rows.to(tl.float32)
    of_bias, of_weight = tl.sum(first, 0), tl.sum(second, 0) * scale
    tl.store(d_bias + c, of_bias, mask=here)
    tl.store(d_weight + c, of_weight, mask=here)
    constant, slope = of_bias / count, scale * of_weight / count
    for row in range(0, num_rows, BLOCK_R):
        at, inside = (row + r)[:, None] * (chunks * VEC) + c[None, :], (row + r < num_rows)[:, None] & here[None, :]
        g, d = _gradient(dy, x, y, at, inside, m, a, b, RELU)
        if d_residual is not None:
            tl.store(d_residual + at, g.to(d_residual.dtype.element_ty), mask=inside)
        value = a[None, :] * (g - constant[None, :] - d * slope[None, :])
        tl.store(dx + at, value.to(dx.dtype.element_ty), mask=inside)

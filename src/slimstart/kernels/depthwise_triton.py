# mypy: ignore-errors
"""Device code of `depthwise`: Triton's own language, which only looks like Python.

A program has a tile of neighbouring pixels, counted through the whole batch, and of neighbouring channels, whose
numbers lie side by side in memory. Sizes are plain arguments: none is worth a compilation of its own. `VEC` divides the
number of channels, `chunks * VEC`, and tells the compiler how wide a load may be.
"""

import triton
import triton.language as tl

SIZES = ["count", "chunks", "height", "width", "out_height", "out_width", "images", "at_once"]


@triton.jit
def _pixels(tile, count, height, width, BLOCK_P: tl.constexpr):
    """Of a tile: pixels' numbers, (image, row, column), and which of them there are."""
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    row = p // width
    image = row // height
    return p, image, row - image * height, p - row * width, image < count


@triton.jit
def _channels(chunks, VEC: tl.constexpr, BLOCK_C: tl.constexpr):
    """Numbers of the channels of this program, how many there are in all, and which of the numbers are there."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channels = chunks * VEC
    return c, channels, c < channels


@triton.jit(do_not_specialize=SIZES)
def forward(
    x, weight, bias, y, count, chunks, height, width, out_height, out_width,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The convolution."""
    p, image, i, j, there = _pixels(tl.program_id(0), count, out_height, out_width, BLOCK_P)
    c, channels, inside = _channels(chunks, VEC, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(TAPS_H):
        for m in tl.static_range(TAPS_W):
            h, w = i * STRIDE_H + k * DILATION_H - PADDING_H, j * STRIDE_W + m * DILATION_W - PADDING_W
            reads = there & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            at = ((image * height + h) * width + w)[:, None] * channels + c[None, :]
            value = tl.load(x + at, mask=reads[:, None] & inside[None, :], other=0.0).to(tl.float32)
            tap = tl.load(weight + c * (TAPS_H * TAPS_W) + k * TAPS_W + m, mask=inside, other=0.0).to(tl.float32)
            total += value * tap[None, :]
    at = p[:, None] * channels + c[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=SIZES)
def backward(
    dy, weight, dx, count, chunks, height, width, out_height, out_width,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of x: of every pixel, from the results that have read it."""
    p, image, h, w, there = _pixels(tl.program_id(0), count, height, width, BLOCK_P)
    c, channels, inside = _channels(chunks, VEC, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for k in tl.static_range(TAPS_H):
        for m in tl.static_range(TAPS_W):
            far_h, far_w = h + PADDING_H - k * DILATION_H, w + PADDING_W - m * DILATION_W
            i, j = far_h // STRIDE_H, far_w // STRIDE_W
            reads = there & (far_h >= 0) & (i < out_height) & (far_w >= 0) & (j < out_width)
            reads = reads & (i * STRIDE_H == far_h) & (j * STRIDE_W == far_w)
            at = ((image * out_height + i) * out_width + j)[:, None] * channels + c[None, :]
            value = tl.load(dy + at, mask=reads[:, None] & inside[None, :], other=0.0).to(tl.float32)
            tap = tl.load(weight + c * (TAPS_H * TAPS_W) + k * TAPS_W + m, mask=inside, other=0.0).to(tl.float32)
            total += value * tap[None, :]
    at = p[:, None] * channels + c[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=SIZES)
def backward_filter(
    dy, x, partial, count, chunks, height, width, out_height, out_width, images, at_once,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums, (programs, T, C), of the gradient of the filters, one tap after another.

    A program has one tile of places in `at_once` images, and goes through `images` images with it.
    """
    p, image, i, j, there = _pixels(tl.program_id(0), at_once, out_height, out_width, BLOCK_P)
    c, channels, inside = _channels(chunks, VEC, BLOCK_C)
    first = tl.program_id(2) * images
    last = tl.minimum(first + images, count)
    to = p[:, None] * channels + c[None, :]
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    for k in range(TAPS_H):
        for m in range(TAPS_W):
            h, w = i * STRIDE_H + k * DILATION_H - PADDING_H, j * STRIDE_W + m * DILATION_W - PADDING_W
            reads = there & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            at = ((image * height + h) * width + w)[:, None] * channels + c[None, :]
            total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
            for n in range(first, last, at_once):
                some = (reads & (n + image < last))[:, None] & inside[None, :]
                value = tl.load(x + n * height * width * channels + at, mask=some, other=0.0).to(tl.float32)
                g = tl.load(dy + n * out_height * out_width * channels + to, mask=some, other=0.0).to(tl.float32)
                total += value * g
            row = (program * TAPS_H + k) * TAPS_W + m
            tl.store(partial + row * channels + c, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["num_partials", "columns", "channels"])
def backward_finish(partial, d_weight, num_partials, columns, channels, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    """The gradient of the filters, (C, T), from its partial sums, in a fixed order."""
    column = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < columns
    total = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for start in range(0, num_partials, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        at = row[:, None] * columns + column[None, :]
        total += tl.load(partial + at, mask=(row < num_partials)[:, None] & inside[None, :], other=0.0)
    tap, taps = column // channels, columns // channels
    at = (column - tap * channels) * taps + tap
    tl.store(d_weight + at, tl.sum(total, 0).to(d_weight.dtype.element_ty), mask=inside)

# mypy: ignore-errors
"""Device code of `depthwise`: Triton's own language, which only looks like Python.

A program has a tile of consecutive pixels, counted through the whole batch, and of consecutive channels, which are
contiguous in memory (channels-last). Sizes are not specialised: Triton would compile further variants for sizes that
are 1 or multiples of 16. `VEC` divides the number of channels, `chunks * VEC`, and is a constant, so that the compiler
can prove alignment and vectorise loads.
"""

import triton
import triton.language as tl

SIZES = ["count", "chunks", "height", "width", "out_height", "out_width", "images", "at_once"]


@triton.jit
def _pixels(tile, count, height, width, BLOCK_P: tl.constexpr):
    """Pixels of a tile: their numbers, (image, row, column), and whether they exist."""
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    row = p // width
    image = row // height
    return p, image, row - image * height, p - row * width, image < count


@triton.jit
def _channels(chunks, VEC: tl.constexpr, BLOCK_C: tl.constexpr):
    """Channels of this program, and the number of all channels."""
    return tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), chunks * VEC


@triton.jit
def _load(images, pixel, there, c, channels):
    """Values of pixels, by their number in the batch, and channels; zero where a pixel does not exist."""
    at = pixel[:, None] * channels + c[None, :]
    return tl.load(images + at, mask=there[:, None] & (c < channels)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(images, values, pixel, there, c, channels):
    """Write values to the addresses that `_load` reads."""
    at = pixel[:, None] * channels + c[None, :]
    tl.store(images + at, values.to(images.dtype.element_ty), mask=there[:, None] & (c < channels)[None, :])


@triton.jit
def _load_row(row, c, channels):
    """One value per channel, broadcast over pixels."""
    return tl.load(row + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _read(
    i, j, height, width, TAP: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The pixel that the output at (i, j) reads with a tap, and whether it exists."""
    h = i * STRIDE[0] + TAP // TAPS[1] * DILATION[0] - PADDING[0]
    w = j * STRIDE[1] + TAP % TAPS[1] * DILATION[1] - PADDING[1]
    return h * width + w, (h >= 0) & (h < height) & (w >= 0) & (w < width)


@triton.jit
def _reader(
    h, w, height, width, TAP: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The output, of (height, width) outputs, that reads the pixel (h, w) with a tap, and whether it exists."""
    far_h = h + PADDING[0] - TAP // TAPS[1] * DILATION[0]
    far_w = w + PADDING[1] - TAP % TAPS[1] * DILATION[1]
    i, j = far_h // STRIDE[0], far_w // STRIDE[1]
    there = (far_h >= 0) & (i < height) & (far_w >= 0) & (j < width)
    return i * width + j, there & (i * STRIDE[0] == far_h) & (j * STRIDE[1] == far_w)


@triton.jit(do_not_specialize=SIZES)
def forward(
    x, filters, bias, y, count, chunks, height, width, out_height, out_width,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The convolution."""
    p, image, i, j, there = _pixels(tl.program_id(0), count, out_height, out_width, BLOCK_P)
    c, channels = _channels(chunks, VEC, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    if bias is not None:
        total += _load_row(bias, c, channels)
    NUM_TAPS: tl.constexpr = TAPS[0] * TAPS[1]
    for tap in tl.static_range(NUM_TAPS):
        pixel, reads = _read(i, j, height, width, tap, STRIDE, PADDING, DILATION, TAPS)
        value = _load(x, image * height * width + pixel, there & reads, c, channels)
        total += value * _load_row(filters + tap * channels, c, channels)
    _store(y, total, p, there, c, channels)


@triton.jit(do_not_specialize=SIZES)
def backward(
    dy, filters, dx, count, chunks, height, width, out_height, out_width,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of x: for every pixel a sum over the outputs that read it, so no atomics are needed."""
    p, image, h, w, there = _pixels(tl.program_id(0), count, height, width, BLOCK_P)
    c, channels = _channels(chunks, VEC, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    NUM_TAPS: tl.constexpr = TAPS[0] * TAPS[1]
    for tap in tl.static_range(NUM_TAPS):
        result, reads = _reader(h, w, out_height, out_width, tap, STRIDE, PADDING, DILATION, TAPS)
        value = _load(dy, image * out_height * out_width + result, there & reads, c, channels)
        total += value * _load_row(filters + tap * channels, c, channels)
    _store(dx, total, p, there, c, channels)


@triton.jit(do_not_specialize=SIZES)
def backward_filter(
    dy, x, partial, count, chunks, height, width, out_height, out_width, images, at_once,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums, (programs, T, C), of the gradient of the filters.

    A program has one tile of pixel positions in `at_once` images, and loops over `images` images with it.
    """
    p, image, i, j, there = _pixels(tl.program_id(0), at_once, out_height, out_width, BLOCK_P)
    c, channels = _channels(chunks, VEC, BLOCK_C)
    first = tl.program_id(2) * images
    last = tl.minimum(first + images, count)
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    NUM_TAPS: tl.constexpr = TAPS[0] * TAPS[1]
    # A tuple of blocks, one per tap: they stay in registers, and a tensor with a dimension of 9 taps is not possible,
    # because Triton's sizes are powers of two.
    totals = ()
    for _ in tl.static_range(NUM_TAPS):
        totals += (tl.zeros([BLOCK_P, BLOCK_C], tl.float32),)
    for n in range(first, last, at_once):
        some = there & (n + image < last)
        g = _load(dy, n * out_height * out_width + p, some, c, channels)
        more = ()
        for tap in tl.static_range(NUM_TAPS):
            pixel, reads = _read(i, j, height, width, tap, STRIDE, PADDING, DILATION, TAPS)
            value = _load(x, (n + image) * height * width + pixel, some & reads, c, channels)
            more += (totals[tap] + value * g,)
        totals = more
    for tap in tl.static_range(NUM_TAPS):
        tl.store(partial + (program * NUM_TAPS + tap) * channels + c, tl.sum(totals[tap], 0), mask=c < channels)


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

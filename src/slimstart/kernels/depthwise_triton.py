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


@triton.jit
def _read(
    i, j, height, width, TAP: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Which pixel of an image a result at (i, j) reads with a tap, and whether there is one."""
    h = i * STRIDE[0] + TAP // TAPS[1] * DILATION[0] - PADDING[0]
    w = j * STRIDE[1] + TAP % TAPS[1] * DILATION[1] - PADDING[1]
    return h * width + w, (h >= 0) & (h < height) & (w >= 0) & (w < width)


@triton.jit
def _reader(
    h, w, height, width, TAP: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Which result reads the pixel (h, w) with a tap, of (height, width) results, and whether one does."""
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
    c, channels, inside = _channels(chunks, VEC, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    NUM_TAPS: tl.constexpr = TAPS[0] * TAPS[1]
    for tap in tl.static_range(NUM_TAPS):
        pixel, reads = _read(i, j, height, width, tap, STRIDE, PADDING, DILATION, TAPS)
        at = (image * height * width + pixel)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=(there & reads)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += value * tl.load(filters + tap * channels + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = p[:, None] * channels + c[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=SIZES)
def backward(
    dy, filters, dx, count, chunks, height, width, out_height, out_width,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of x: of every pixel, from the results that have read it."""
    p, image, h, w, there = _pixels(tl.program_id(0), count, height, width, BLOCK_P)
    c, channels, inside = _channels(chunks, VEC, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    NUM_TAPS: tl.constexpr = TAPS[0] * TAPS[1]
    for tap in tl.static_range(NUM_TAPS):
        result, reads = _reader(h, w, out_height, out_width, tap, STRIDE, PADDING, DILATION, TAPS)
        at = (image * out_height * out_width + result)[:, None] * channels + c[None, :]
        value = tl.load(dy + at, mask=(there & reads)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += value * tl.load(filters + tap * channels + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = p[:, None] * channels + c[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=SIZES)
def backward_filter(
    dy, x, partial, count, chunks, height, width, out_height, out_width, images, at_once,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr,
    VEC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums, (programs, T, C), of the gradient of the filters.

    A program has one tile of places in `at_once` images, and goes through `images` images with it.
    """
    p, image, i, j, there = _pixels(tl.program_id(0), at_once, out_height, out_width, BLOCK_P)
    c, channels, inside = _channels(chunks, VEC, BLOCK_C)
    first = tl.program_id(2) * images
    last = tl.minimum(first + images, count)
    to = p[:, None] * channels + c[None, :]
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    NUM_TAPS: tl.constexpr = TAPS[0] * TAPS[1]
    totals = ()
    for _ in tl.static_range(NUM_TAPS):
        totals += (tl.zeros([BLOCK_P, BLOCK_C], tl.float32),)
    for n in range(first, last, at_once):
        some = there & (n + image < last)
        at = n * out_height * out_width * channels + to
        g = tl.load(dy + at, mask=some[:, None] & inside[None, :], other=0.0).to(tl.float32)
        more = ()
        for tap in tl.static_range(NUM_TAPS):
            pixel, reads = _read(i, j, height, width, tap, STRIDE, PADDING, DILATION, TAPS)
            at = ((n + image) * height * width + pixel)[:, None] * channels + c[None, :]
            value = tl.load(x + at, mask=(some & reads)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            more += (totals[tap] + value * g,)
        totals = more
    for tap in tl.static_range(NUM_TAPS):
        tl.store(partial + (program * NUM_TAPS + tap) * channels + c, tl.sum(totals[tap], 0), mask=inside)


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

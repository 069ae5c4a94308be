# mypy: ignore-errors
"""Device code of `take_channels`.

`x` and `y` are matrices here, and each row holds `stack` rows of the tensor, concatenated. The source of a column is
computed once for the ROWS rows of a program, because a division costs more than moving 16 bits.
"""

import triton
import triton.language as tl


# Triton compiles further variants for sizes that are 1 or multiples of 16, and sizes change with every structure.
@triton.jit(do_not_specialize=["num_elements", "stack", "x_row", "y_row", "num_chunks", "num_tiles"])
def take(
    y, x, index, num_elements, stack, x_row, y_row, pixels, num_chunks, num_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    place = column % y_row
    source = tl.load(index + place // pixels)
    offset = (column // y_row).to(tl.int64) * x_row + source.to(tl.int64) * pixels + place % pixels
    for i in tl.static_range(ROWS):
        # Rows far apart, not 16 neighbours: those look aligned, so the compiler would give each thread a run of columns
        # to store at once, at the price of eight uncoalesced loads.
        row = (tile + i * num_tiles).to(tl.int64) * stack
        width = tl.maximum(tl.minimum(num_elements - row * y_row, stack * y_row), 0).to(tl.int32)
        inside = column < width
        value = tl.load(x + row * x_row + offset, mask=inside & (source >= 0), other=0)
        tl.store(y + row * y_row + column, value, mask=inside)

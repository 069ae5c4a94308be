# mypy: ignore-errors
"""Device code of `moves`: each program moves one block of narrow elements after the other.

`blocks` has (row number, first element) of each block. `rows` has, for each tensor, the addresses of the narrow and the
dense one, the number of narrow elements, and (size, dense stride, start of positions or -1) of each dimension in the
narrow tensor's memory order, see `Move.dims`.
"""

import triton
import triton.language as tl


@triton.jit
def _locate(kind, block, rows, positions, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """Addresses of a block's elements on both sides, which of them exist, and which have a dense counterpart."""
    # An address in the table is an integer. Only the type of the pointer `kind` tells the compiler what it points to.
    row = rows + tl.load(block) * (3 + 3 * DIMS)
    rest = tl.load(block + 1) + tl.arange(0, BLOCK)
    exists = rest < tl.load(row + 2)
    filled = exists
    narrow = tl.load(row).to(kind.dtype) + rest
    dense = tl.load(row + 1).to(kind.dtype)
    offset = tl.zeros([BLOCK], dtype=tl.int64)
    for d in tl.static_range(DIMS - 1, -1, -1):
        dim = row + 3 + 3 * d
        index = rest
        if d > 0:
            # 32 bits are enough within one tensor, and GPUs emulate a 64-bit division in several times the time.
            size = tl.load(dim).to(tl.int32)
            index = rest % size
            rest = rest // size
        start = tl.load(dim + 2)
        narrowed = exists & (rest * 0 + start >= 0)  # `rest * 0` makes it a block
        index = tl.where(narrowed, tl.load(positions + start + index, mask=narrowed, other=-1), index)
        filled &= index >= 0
        offset += index.to(tl.int64) * tl.load(dim + 1)
    return narrow, dense + offset, exists, filled


@triton.jit(do_not_specialize=["num_blocks"])
def gather(kind, blocks, rows, positions, num_blocks, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    for number in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0), num_stages=1):
        narrow, dense, exists, filled = _locate(kind, blocks + 2 * number, rows, positions, DIMS, BLOCK)
        tl.store(narrow, tl.load(dense, mask=filled, other=0), mask=exists)


@triton.jit(do_not_specialize=["num_blocks"])
def scatter(kind, blocks, rows, positions, num_blocks, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    for number in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0), num_stages=1):
        narrow, dense, _, filled = _locate(kind, blocks + 2 * number, rows, positions, DIMS, BLOCK)
        tl.store(dense, tl.load(narrow, mask=filled), mask=filled)

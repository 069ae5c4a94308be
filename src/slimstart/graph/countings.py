"""What could an attribute count, where a size is computed from it?

A forward asks for `self.heads * self.head_dim` channels, and there are 4 * 12. Then `self.heads` may count blocks of 12
that lie together, or `self.head_dim` every twelfth channel: whichever is changed makes the size follow, and what it
counts goes as a whole. Which one agrees with the rest of the forward is not known here: all are listed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

from torch import Tensor

from slimstart.graph.constraints import Layout
from slimstart.graph.sizes import Arithmetic, Attribute, Expression, evaluate, full

Rows = list[list[int]]
Counting = tuple[Attribute, Rows]
"""An attribute, and for each of the things that it may count their nodes."""


def countings(size: Expression | int | None, rows: Rows) -> Iterator[Counting]:
    """What the attributes of a size may count, if the size is the number of these rows.

    A sum counts its first part first. A factor of a product counts blocks, or rows that lie a fixed distance apart.
    """
    if isinstance(size, Attribute):
        if size.value == len(rows):
            yield size, rows
    elif isinstance(size, Arithmetic) and evaluate(size, full) == len(rows):
        if size.function is operator.add:
            first = evaluate(size.left, full)
            yield from countings(size.left, rows[:first])
            yield from countings(size.right, rows[first:])
        elif size.function is operator.mul:
            for factor in (size.left, size.right):
                number = evaluate(factor, full)
                if number > 1:
                    length = len(rows) // number
                    yield from countings(factor, [_joined(rows[i * length : (i + 1) * length]) for i in range(number)])
                    yield from countings(factor, [_joined(rows[i::number]) for i in range(number)])


def countings_along(layout: Layout, dim: int) -> Iterator[Counting]:
    """What the attributes in the sizes of a layout may count, if channels go along one of its dimensions.

    A dividend, as `self.dim` in `view(..., self.heads, self.dim // self.heads)`, counts along the neighbours too.
    """
    yield from countings(layout.sizes[dim], rows_along(layout.nodes, [dim]))
    dims = [d for d in range(layout.nodes.dim()) if layout.nodes.shape[d] > 1]
    runs = [dims[i:j] for i in range(len(dims)) for j in range(i + 1, len(dims) + 1) if dim in dims[i:j]]
    for dividend in (dividend for size in layout.sizes for dividend in _dividends(size)):
        for run in runs:
            if math.prod(layout.nodes.shape[d] for d in run) == evaluate(dividend, full):
                yield from countings(dividend, rows_along(layout.nodes, run))


def rows_along(nodes: Tensor, dims: Sequence[int]) -> Rows:
    """The nodes at each index along these dimensions together."""
    front = nodes.movedim(list(dims), list(range(len(dims))))
    rows: Rows = front.reshape(math.prod(front.shape[: len(dims)]), -1).tolist()
    return rows


def _dividends(size: Expression | int | None) -> Iterator[Expression | int]:
    if isinstance(size, Arithmetic):
        if size.function is operator.floordiv:
            yield size.left
        yield from _dividends(size.left)
        yield from _dividends(size.right)


def _joined(rows: Rows) -> list[int]:
    return [node for row in rows for node in row]

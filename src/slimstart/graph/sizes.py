"""Integers that remember where they come from.

A user's forward computes sizes: `b, c, h, w = x.shape; x.view(b, self.groups, c // self.groups, h, w)`. When channels
are removed, `c` is smaller, and `self.groups` is the same unless the attribute is changed too. To know where a size
comes from, the tracer gives the forward `Size` objects in place of plain integers: they behave as integers and have an
expression whose leaves are dimensions of tensors and attributes of modules.

A `Size` that is turned into a number (`c ** -0.5`, `int(c)`, `math.sqrt(c)`) is used as one, not as a shape. A narrow
network would compute another number, so the size must not shrink: `Size` calls `report`. It does so, too, where two
sizes are compared and are equal (`assert c == self.dim`), because they must remain equal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Dimension:
    """Leaf: the length of a tensor dimension; row i of `nodes` holds the channel nodes found at index i."""

    nodes: Tensor


@dataclass(frozen=True)
class Attribute:
    """Leaf: an integer attribute of one of the user's modules, or "name[index]" for an entry of a list or tuple."""

    module: str
    name: str
    value: int


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """`function(left, right)`, where either side is an expression or a plain integer."""

    function: Callable[[int, int], int]
    left: Expression | int
    right: Expression | int


Expression = Dimension | Attribute | Arithmetic


def evaluate(expression: Expression | int, leaf: Callable[[Dimension | Attribute], int], exact: bool = False) -> int:
    """The value of an expression, given that of its leaves.

    Raises:
        ArithmeticError: for a division by zero, and with `exact` for one with a remainder.
    """
    if isinstance(expression, int):
        return int(expression)
    if isinstance(expression, Arithmetic):
        left, right = (evaluate(side, leaf, exact) for side in (expression.left, expression.right))
        if exact and expression.function is operator.floordiv and left % right:
            raise ArithmeticError(f"{left} // {right} has a remainder")
        return expression.function(left, right)
    return leaf(expression)


def full(leaf: Dimension | Attribute) -> int:
    """The value of a leaf in the dense network."""
    return leaf.value if isinstance(leaf, Attribute) else len(leaf.nodes)


def leaves(expression: Expression | int) -> list[Dimension | Attribute]:
    """The dimensions and attributes on which an expression depends."""
    if isinstance(expression, int):
        return []
    if isinstance(expression, Arithmetic):
        return leaves(expression.left) + leaves(expression.right)
    return [expression]


def _only_shrinks(expression: Expression | int) -> bool:
    """Whether an expression is at most what it is in the dense network: no leaf is subtracted or divides."""
    if isinstance(expression, Arithmetic):
        divided = expression.function is operator.floordiv and isinstance(expression.right, int)
        monotone = divided or expression.function in (operator.add, operator.mul)
        return monotone and _only_shrinks(expression.left) and _only_shrinks(expression.right)
    return not isinstance(expression, int) or expression >= 0


Report = Callable[..., None]
"""Called with an expression that is used as a number, or with two that have been found equal."""


class Size(int):
    """An `int` with an expression. Integer arithmetic keeps the expression, anything else loses it."""

    expression: Expression
    report: Report

    def __new__(cls, value: int, expression: Expression, report: Report) -> Size:
        size = super().__new__(cls, value)
        size.expression = expression
        size.report = report
        return size

    def _combined(self, function: Callable[[Any, Any], int], other: object, swapped: bool = False) -> Any:
        if not isinstance(other, int):
            self.report(self.expression)
            return NotImplemented
        mine, theirs = self.expression, expression_of(other)
        left, right = (theirs, mine) if swapped else (mine, theirs)
        values = (plain(other), plain(self)) if swapped else (plain(self), plain(other))
        return Size(function(*values), Arithmetic(function, left, right), self.report)

    def __add__(self, other: Any) -> Any:
        return self._combined(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._combined(operator.add, other, swapped=True)

    def __sub__(self, other: Any) -> Any:
        return self._combined(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._combined(operator.sub, other, swapped=True)

    def __mul__(self, other: Any) -> Any:
        return self._combined(operator.mul, other)

    def __rmul__(self, other: Any) -> Any:
        return self._combined(operator.mul, other, swapped=True)

    def __floordiv__(self, other: Any) -> Any:
        return self._combined(operator.floordiv, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._combined(operator.floordiv, other, swapped=True)

    def __mod__(self, other: Any) -> Any:
        return self._combined(operator.mod, other)

    def _number(self) -> int:
        self.report(self.expression)
        return plain(self)

    def __int__(self) -> int:
        return self._number()

    __trunc__ = __floor__ = __ceil__ = __int__

    def __round__(self, digits: int | None = None) -> int:  # type: ignore[override]
        return round(self._number(), digits)

    def __float__(self) -> float:
        return float(self._number())

    def __truediv__(self, other: Any) -> Any:
        return self._number() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._number()

    def __pow__(self, other: Any, mod: Any = None) -> Any:
        return pow(self._number(), other, mod)

    def __rpow__(self, other: Any, mod: Any = None) -> Any:
        return pow(other, self._number(), mod)

    # The result of a comparison, such as a branch or a minimum width, may differ in a narrow network; not so if it says
    # that the size is below a literal, for a size that only shrinks.

    def _compared(self, other: object, below: bool) -> int:
        literal = isinstance(other, int) and not isinstance(other, Size)
        if not (below and literal and _only_shrinks(self.expression)):
            self.report(self.expression)
        return plain(self)

    def __lt__(self, other: Any) -> Any:
        return self._compared(other, below=int.__lt__(self, other) is True).__lt__(other)

    def __le__(self, other: Any) -> Any:
        return self._compared(other, below=int.__le__(self, other) is True).__le__(other)

    def __gt__(self, other: Any) -> Any:
        return self._compared(other, below=int.__le__(self, other) is True).__gt__(other)

    def __ge__(self, other: Any) -> Any:
        return self._compared(other, below=int.__lt__(self, other) is True).__ge__(other)

    def __eq__(self, other: object) -> bool:
        same = int.__eq__(self, other)
        if same is True:
            self.report(self.expression, expression_of(other))
        return same

    def __ne__(self, other: object) -> bool:
        different = int.__ne__(self, other)
        if different is False:
            self.report(self.expression, expression_of(other))
        return different

    __hash__ = int.__hash__

    def __reduce__(self) -> Any:
        return int, (plain(self),)


def plain(size: Any) -> int:
    """A size as an integer without an expression; this is no use that is reported."""
    return int.__int__(size)


def expression_of(size: Any) -> Expression | int:
    """The expression of a size, or the integer itself."""
    return size.expression if isinstance(size, Size) else plain(size)


class Shape(tuple[int, ...]):
    """The `tensor.shape` of a traced tensor: a tuple, because `torch.Size` converts its items to plain int."""

    __slots__ = ()

    def numel(self) -> int:
        product = 1
        for size in self:
            product = product * size
        return product

"""What the tracer knows of a tensor, and of one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Value:
    """What is known of a tensor: integer tensors of its shape (length one where nothing changes), moved as it is.

    An activation has one field, its node ids. A parameter or buffer has `source`, its name, and one field per dimension
    of the original: from which index each entry comes.
    """

    fields: tuple[Tensor, ...]
    shape: torch.Size
    source: str | None = None

    @property
    def nodes(self) -> Tensor:
        assert self.source is None
        return self.fields[0]

    def varies(self) -> list[int]:
        """Dimensions along which some field changes."""
        return [dim for dim in range(len(self.shape)) if any(f.shape[dim] > 1 for f in self.fields)]

    def moved(self, operation: Callable[[Tensor], Tensor]) -> Value:
        """The value behind an operation that only moves entries."""
        fields = tuple(operation(f.expand(self.shape)) for f in self.fields)
        return Value(tuple(compress(f) for f in fields), fields[0].shape if fields else torch.Size(), self.source)


def compress(field: Tensor) -> Tensor:
    """The same field, of length one along every dimension where it does not change."""
    for dim, size in enumerate(field.shape):
        if size > 1:
            first = field.narrow(dim, 0, 1)
            if field.stride(dim) == 0 or bool((field == first).all()):
                field = first
    return field


@dataclass(frozen=True)
class Call:
    """One operation: its arguments by the names of its schema, its result, and the sizes the user wrote."""

    name: str
    arguments: dict[str, Any]
    result: Any
    written: tuple[Any, ...]
    func: Any

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def subject(self) -> Any:
        """The tensor that the operation is applied to; schemas call it `self` or `input`."""
        return self.arguments["self"] if "self" in self.arguments else self.arguments["input"]

    @property
    def results(self) -> list[Tensor]:
        """All tensors of the result."""
        several = self.result if isinstance(self.result, tuple | list) else (self.result,)
        return [result for result in several if isinstance(result, Tensor)]


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in func._schema.arguments), args, strict=False))
    bound.update(kwargs)
    return bound

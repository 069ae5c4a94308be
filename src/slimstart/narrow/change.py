"""A change of structure as a transaction: prepared in full, then made by assignments that can be repeated.

Everything that can fail (memory, a refused optimizer state) fails while a `Change` is prepared, before anything in use
has been modified. `apply` then only assigns tensors and numbers that exist already. If it is interrupted at any line,
calling it once more completes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Change:
    """A list of assignments that are made together.

    Attributes:
        reshapes: whether parameters may get other shapes.
    """

    def __init__(self) -> None:
        self._assignments: list[Callable[[], object]] = []
        self.reshapes = False

    def swap(self, tensor: Tensor, value: Tensor) -> None:
        """Give `tensor`, which remains the same object, the storage, shape and type of `value`; drop its gradient."""
        self._assignments.append(partial(swap_, tensor, value))

    def copy(self, tensor: Tensor, value: Tensor) -> None:
        """Copy the numbers of `value` to `tensor`, which keeps its address."""
        self._assignments.append(partial(_copy_, tensor, value))

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        self._assignments.append(partial(mapping.__setitem__, key, value))

    def set(self, owner: object, attribute: str, value: Any) -> None:
        self._assignments.append(partial(setattr, owner, attribute, value))

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function, which must have the same effect if it is called again."""
        self._assignments.append(partial(function, *args))

    def apply(self) -> None:
        """Make all assignments, in their order."""
        for assignment in self._assignments:
            assignment()


class Transactions:
    """Changes that are made as a whole or not at all, also when they are interrupted.

    A call returns a context. If it ends with an exception, the small state is restored, unless a change was committed.

    Args:
        state: returns the small state; later changes must not modify what it returns.
        restore: the inverse, by assignments.
    """

    def __init__(self, state: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        self._state, self._restore = state, restore
        self._undo: tuple[Any] | None = None
        self._redo: Change | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._undo = (self._state(),)
        try:
            yield
        except BaseException:
            self.recover()
            raise
        self._undo = None

    def commit(self, change: Change) -> None:
        """Make a change. If it is interrupted, it is completed and not undone."""
        self._redo = change
        try:
            change.apply()
        except BaseException:
            self.recover()  # assignments only: once more completes what was interrupted
            raise
        self._done()

    def recover(self) -> None:
        """Complete or undo what was interrupted, if anything was."""
        if self._redo is not None:
            self._redo.apply()
            self._done()
        elif self._undo is not None:
            self._restore(self._undo[0])
            self._undo = None

    def _done(self) -> None:
        self._undo = None  # in this order: while a change is to be repeated, nothing is undone
        self._redo = None


def swap_(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor another storage and shape, even while the user holds a loss that was computed from it.

    Autograd keeps the gradient accumulator of a parameter alive with such a loss, and it expects gradients of the old
    shape. It is dropped when the type of the data changes, so the data becomes an empty tensor of another type first.
    """
    if tensor.is_leaf:
        tensor.grad = None
    other = torch.float16 if value.dtype != torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=value.device)
    tensor.data = value


def _copy_(tensor: Tensor, value: Tensor) -> None:
    tensor.detach().copy_(value)

"""Counters that are increased all at once: every batch norm counts its batches, by a kernel for one number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slimstart.steps.calls import Call

INCREMENTS = frozenset({Tensor.add_, Tensor.__iadd__})


class Counters:
    """Increments that wait until the forward ends, or until somebody wants to know the number."""

    def __init__(self) -> None:
        self._waiting: set[Tensor] = set()

    def settle(self, operands: Sequence[Tensor]) -> None:
        """Give the counters that a call can see through its operands their true values."""
        integers = [tensor for tensor in operands if not tensor.is_floating_point()]
        for counter in [c for c in self._waiting if any(_share_memory(c, tensor) for tensor in integers)]:
            self._waiting.remove(counter)
            counter.add_(1)

    def take(self, call: Call) -> bool:
        """Whether the call adds 1 to a counter; that waits then. `settle` comes before."""
        if not _increments(call):
            return False
        self._waiting.add(call.args[0])
        return True

    def finish(self) -> None:
        """Give all counters their true values."""
        if self._waiting:
            torch._foreach_add_(list(self._waiting), 1)
            self._waiting.clear()


def _increments(call: Call) -> bool:
    if call.func not in INCREMENTS or call.kwargs or len(call.args) != 2:
        return False
    counter, one = call.args
    return (
        type(one) is int
        and one == 1
        and type(counter) is Tensor
        and counter.dim() == 0
        and not (counter.is_floating_point() or counter.is_complex() or counter.dtype == torch.bool)
        and not counter.is_inference()  # it cannot be written when the forward has ended
    )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]

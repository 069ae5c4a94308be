"""Tables: objects of tensors that can be had on any device."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor


class Tables:
    """An object whose attributes are tensors, other `Tables`, and plain values.

    Attributes:
        device: where the tensors are; they are made on the CPU.
    """

    device = torch.device("cpu")

    def to(self, device: torch.device | str) -> Self:
        """This object on a device: a copy that shares the tensors which are there already."""
        moved = copy.copy(self)
        vars(moved).update({name: _moved(value, device) for name, value in vars(self).items()})
        moved.device = torch.device(device)
        return moved


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor | Tables) else value

"""The store: dense weights, statistics and optimizer state, of which a narrow network has a part.

A narrow module has the entries that a `Selection` keeps. All others are stored here, with their optimizer state, until
they are used again. Entries that the module has are out of date here until `write`; nothing reads them before.

The store takes over the dense model's tensors without a copy, so weights exist once. It is on the model's device or on
the host; then narrow tensors are transferred at a change of structure only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from slimstart.graph import Selection
from slimstart.narrow.compact import narrow_tensor


class Key(NamedTuple):
    """A tensor in the store: a parameter or buffer by name, or a tensor of a parameter's optimizer state."""

    name: str
    state: str | None = None


class Store(dict[Key, Tensor]):
    """Dense tensors by key.

    Args:
        tensors: dense weights and statistics by name; not copied.
        host: keep everything on the host, whatever the device of narrow networks.
    """

    def __init__(self, tensors: Mapping[str, Tensor], host: bool = False) -> None:
        # `detach` would share a parameter's version counter, so that a write here would invalidate the model's graph.
        super().__init__({Key(name): tensor.data for name, tensor in tensors.items()})
        self.host = host

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights and statistics by name."""
        return {key.name: dense for key, dense in self.items() if key.state is None}

    @property
    def num_bytes(self) -> int:
        """The size of all dense tensors."""
        return sum(dense.nbytes for dense in self.values())

    def drop_state(self, name: str) -> None:
        """Forget the optimizer state of a parameter."""
        for key in [key for key in self if key.name == name and key.state is not None]:
            del self[key]

    def copy(self) -> Store:
        """A store of weights and statistics with the same values."""
        return Store({name: dense.clone() for name, dense in self.tensors.items()}, self.host)

    def read(self, key: Key, selection: Selection, device: torch.device, plain: bool = False) -> Tensor:
        """The narrow tensor of a selection, as a new tensor; `plain` as for `compact`."""
        return narrow_tensor(selection, key.name, self[key], plain).to(device)

    def write(self, key: Key, selection: Selection, narrow: Tensor, start: float | None = 0.0) -> None:
        """Bring the dense tensor up to date with its narrow part.

        Args:
            start: initial value of entries that no network has had yet, for state that the optimizer has just made;
                None for the parameter's own values.
        """
        dense = self.like(key, narrow, start)
        selection.scatter_(key.name, dense, narrow.to(dense.device))

    def like(self, key: Key, narrow: Tensor, start: float | None = 0.0) -> Tensor:
        """The dense tensor, made or converted to the type, device and memory order of its narrow part if necessary."""
        device = torch.device("cpu") if self.host else narrow.device
        if key not in self:
            weights = self[Key(key.name)]
            made = torch.empty_like(weights, dtype=narrow.dtype, device=device)
            self[key] = made.copy_(weights) if start is None else made.fill_(start)
        dense = self[key]
        if dense.dtype != narrow.dtype or dense.device != device:
            dense = dense.to(device, narrow.dtype)
        if dense.dim() == 4 and dense.is_contiguous() and not narrow.is_contiguous():
            dense = dense.contiguous(memory_format=torch.channels_last)
        self[key] = dense
        return dense


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a number in memory for each of its entries, as those of networks and optimizers do."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() <= max(0, 1 + span)  # otherwise entries share their memory

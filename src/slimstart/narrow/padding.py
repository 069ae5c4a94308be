"""Gradients of padding, which are kept at zero: otherwise padding would learn.

Padding computes zero, but a gradient can reach it all the same: through a stream that another layer writes too, or from
an activation that does not keep zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimstart.graph import Selection
from slimstart.narrow.compact import in_order_of


class PaddingGradients:
    """Hooks on parameters that clear the gradients of their padding.

    Attributes:
        real: for every padded parameter by name, 1 where it is real and 0 where it is padding; empty without padding.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.real: dict[str, Tensor] = {}
        self._handles: dict[str, RemovableHandle] = {}
        self._by_hook = True

    def watch(self) -> None:
        """Register the hooks that are missing: a parameter may have been frozen until now."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._handles:
                self._handles[name] = parameter.register_post_accumulate_grad_hook(partial(self._clear_one, name))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles.values():
            handle.remove()

    def _clear_one(self, name: str, parameter: Tensor) -> None:
        if self._by_hook and parameter.grad is not None and name in self.real:
            parameter.grad.mul_(self.real[name])

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Within, gradients of padding are left as they come, for `clear` to clear them all at once."""
        self._by_hook = False
        try:
            yield
        finally:
            self._by_hook = True

    def clear(self) -> None:
        """Clear the gradients of all padding."""
        found = [(p.grad, self.real[name]) for name, p in self._parameters.items() if p.grad is not None and self.real]
        if found:
            torch._foreach_mul_([grad for grad, _ in found], [real for _, real in found])


def real_entries(selection: Selection, name: str, dense: Tensor, device: torch.device) -> Tensor:
    """1 where a narrow tensor is real and 0 where it is padding, with the dimensions of the dense one in memory."""
    narrow = torch.ones(selection.shape(name, dense.shape), dtype=dense.dtype, device=device)
    for dim, positions in selection.indices(name, device).items():
        narrow.mul_((positions >= 0).to(dense.dtype).view([-1 if d == dim else 1 for d in range(dense.dim())]))
    return in_order_of(dense, narrow)

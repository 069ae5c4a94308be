"""Replacement of removed layers by the identity, in the user's own modules.

`nn.Identity` where a layer is called with one tensor and returns one. Layers with more arguments (the blocks of many
transformers take a mask, and return a tuple) are replaced by `PassThrough`, which returns its first argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slimstart.graph import RemovableLayer

MAX_RESULTS = 100  # of a layer; a file may not ask for more


class PassThrough(nn.Identity):
    """Return the first argument and ignore the others.

    Attributes:
        num_results: the length of the tuple to return, filled with None; 0 for the argument itself.
    """

    def __init__(self, num_results: int = 0) -> None:
        super().__init__()
        self.num_results = num_results

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (input, *[None] * (self.num_results - 1)) if self.num_results else input


def replacement(module: nn.Module, num_results: int | None) -> nn.Module:
    """The module that takes the place of one that is gone, in the same mode; `num_results` as in `RemovableLayer`."""
    identity = nn.Identity() if num_results is None else PassThrough(num_results)
    # Forwards of whole models read settings of their blocks (`block.config`, `layer.self_attn.batch_first`).
    written_by_user = not type(module).__module__.startswith("torch.")
    children = dict(module.named_children()) if written_by_user or num_results is not None else {}
    settings = _data(module) if written_by_user else {}
    for name, value in (settings | {name: _settings(child) for name, child in children.items()}).items():
        if not hasattr(identity, name):
            setattr(identity, name, value)
    return identity.train(module.training)


def _settings(module: nn.Module) -> SimpleNamespace:
    """The settings of a module, and of the modules in it."""
    return SimpleNamespace(**{name: _settings(child) for name, child in module.named_children()} | _data(module))


def _data(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module with neither tensors nor modules, nor functions, which may belong to it."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not any(isinstance(leaf, Tensor) or callable(leaf) for leaf in tree_leaves(value))
    }


def modules_of(layers: Iterable[RemovableLayer]) -> Iterator[tuple[str, int | None]]:
    """(name, num_results) of every module that becomes the identity."""
    for layer in layers:
        yield from zip(layer.modules, layer.num_results, strict=True)

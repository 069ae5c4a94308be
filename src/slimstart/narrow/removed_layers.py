"""Replacement of removed layers by the identity or by zero, in the user's own modules.

`nn.Identity` where a layer is called with one tensor and returns one. Layers with more arguments (the blocks of many
transformers take a mask, and return a tuple) are replaced by `PassThrough`, which returns its first argument. Where the
forward around a layer adds its result to a stream, `Zero` takes its place.
"""

from __future__ import annotations

import reprlib
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


class Zero(PassThrough):
    """Return a zero without dimensions, of the type and on the device of the first argument.

    A sum with it is the other summand, in its own shape and type: the stream may have other channels than the argument.
    """

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input.new_zeros(()))


Instead = int | None | tuple[str, int | None]
"""What takes the place of a module: the identity with `num_results` of `RemovableLayer`, or ("zero", `num_results`)."""


def checked(instead: Any) -> Instead:
    """An `Instead` from a file or a state dict.

    Raises:
        ValueError: it is none.
    """
    zero = isinstance(instead, list | tuple)
    if zero and (len(instead) != 2 or instead[0] != "zero"):
        raise ValueError(f"{reprlib.repr(instead)} does not say what takes the place of a module")
    num_results = instead[1] if zero else instead
    if num_results is not None and not (type(num_results) is int and 0 <= num_results <= MAX_RESULTS):
        raise ValueError(f"{reprlib.repr(num_results)} is no number from 0 to {MAX_RESULTS}")
    return ("zero", num_results) if zero else num_results


def replacement(module: nn.Module, instead: Instead) -> nn.Module:
    """The module that takes the place of one that is gone, in the same mode."""
    zero = isinstance(instead, tuple)
    num_results = instead[1] if isinstance(instead, tuple) else instead
    identity = Zero(num_results or 0) if zero else nn.Identity() if num_results is None else PassThrough(num_results)
    # Forwards of whole models read settings of their blocks (`block.config`, `layer.self_attn.batch_first`).
    written_by_user = not type(module).__module__.startswith("torch.")
    children = dict(module.named_children()) if written_by_user or num_results is not None else {}
    # PyTorch's decoder reads `self_attn.batch_first` of its first layer.
    settings = _data(module) if written_by_user or zero or isinstance(module, nn.MultiheadAttention) else {}
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


def modules_of(layers: Iterable[RemovableLayer]) -> Iterator[tuple[str, Instead]]:
    """(name, what takes its place) of every module that is gone."""
    for layer in layers:
        for number, (name, num_results) in enumerate(zip(layer.modules, layer.num_results, strict=True), 1):
            yield name, ("zero", num_results) if layer.added and number == len(layer.modules) else num_results

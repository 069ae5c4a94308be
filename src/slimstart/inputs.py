"""Arguments of the user's own functions: `example_inputs` of a model, and batches of a loss function."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert `example_inputs` to positional and keyword arguments of a model."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    raise TypeError(
        f"`example_inputs` is a {type(example_inputs).__name__}; give a tensor, a tuple of positional arguments "
        "or a dict of keyword arguments"
    )


def as_batch(batch: Any) -> tuple[Any, ...]:
    """Convert a batch to the arguments of a loss function after the network."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

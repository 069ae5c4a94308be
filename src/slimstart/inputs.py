"""What users pass on to their own functions: `example_inputs` of a model, and batches of a loss function."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments with which to call a model."""
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
    """A batch as the arguments that a loss function takes behind the network."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

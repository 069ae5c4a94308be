"""`example_inputs`: a tensor, a tuple of positional arguments or a dict of keyword arguments, and nothing else."""

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

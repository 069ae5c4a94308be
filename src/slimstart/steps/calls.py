"""Calls of torch functions, numbered in their order: two runs of the same forward make the same calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Function = Callable[..., Any]

# Reads of metadata, which are valid for a tensor that has not been computed yet.
METADATA = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point}
    | {torch.numel, torch.is_floating_point}
    | {getattr(Tensor, name).__get__ for name in "shape ndim dtype device layout is_cuda".split()}
)

# Functions whose second argument is a weight; autocast casts all their floating-point arguments.
LAYER_FUNCTIONS = frozenset(
    {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
)


class DivergedError(RuntimeError):
    """A forward differs from the recorded one; its results must not be used."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the forward differs from the recorded one: {how}. Record it again, or run it unfused")


class Call(NamedTuple):
    """One call of a torch function; `operands` are the tensors among its arguments."""

    number: int
    func: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


class Calls(TorchFunctionMode):
    """Mode that passes every call in the block to `call`; nested calls, within a torch function, are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Factory functions are not numbered: a module may create a tensor in its first forward only.
        if func in METADATA or not operands:
            return func(*args, **kwargs)
        if func == Tensor.data_ptr:  # not numbered either: a custom kernel may ask for it any number of times
            self.expose(*operands)
            return func(*args, **kwargs)
        number, self.number = self.number, self.number + 1
        return self.call(Call(number, func, args, kwargs, operands))

    def call(self, call: Call) -> Any:
        """Run a call, or something else with the same result."""
        raise NotImplementedError

    def expose(self, tensor: Tensor) -> None:
        """Note that the tensor's memory may be read or written from now on, without a call."""
        raise NotImplementedError


def inside_checkpoint() -> bool:
    """Whether activation checkpointing is active: backward reruns such code unfused, and must save equal tensors."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None

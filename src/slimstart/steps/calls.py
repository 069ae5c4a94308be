"""Calls of torch functions, numbered in their order: two runs of one forward make the same."""

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

# They read no numbers: a tensor may be asked for its shape without having been computed.
METADATA = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point}
    | {torch.numel, torch.is_floating_point}
    | {getattr(Tensor, name).__get__ for name in "shape ndim dtype device layout is_cuda".split()}
)

# Their second argument is a weight, and autocast casts whatever floats they get.
LAYER_FUNCTIONS = frozenset(
    {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
)


class DivergedError(RuntimeError):
    """A forward is not the recorded one; its results must not be used."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the forward is not the recorded one: {how}. Record it again, or run it without `fused`")


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
    """Sees the calls that are made within. Calls that such a call makes itself are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in METADATA or not operands:  # what makes a tensor from none may be there for the first run only
            return func(*args, **kwargs)
        if func == Tensor.data_ptr:  # as often as a kernel of somebody's own likes
            self.expose(*operands)
            return func(*args, **kwargs)
        number, self.number = self.number, self.number + 1
        return self.call(Call(number, func, args, kwargs, operands))

    def call(self, call: Call) -> Any:
        """Run a call, or do something else that has its result."""
        raise NotImplementedError

    def expose(self, tensor: Tensor) -> None:
        """Note that the tensor's memory may be read and written from now on, unseen."""
        raise NotImplementedError


def inside_checkpoint() -> bool:
    """Whether a part of the network runs that backward will run again: unfused, and it must save the same tensors."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None

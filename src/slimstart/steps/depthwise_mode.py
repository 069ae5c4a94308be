"""A mode in which depthwise convolutions use one kernel for all widths (`kernels.depthwise`).

cuDNN compiles a kernel for every number of channels, and learned widths are new numbers at every structure update. The
results are those of torch up to rounding. Autocast does not know the kernel, so this mode does the casts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from slimstart.kernels.depthwise import Window, depthwise_conv2d, supports
from slimstart.steps.calls import Function, inside_checkpoint


class AllWidths(TorchFunctionMode):
    """Context in which the kernel computes depthwise convolutions, where it supports them.

    A mode that has to see the calls must be entered inside: PyTorch asks the innermost mode first.
    """

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _convolved(_Conv(*args, **kwargs)) if func is F.conv2d else None
        return func(*args, **kwargs) if result is None else result


class _Conv(NamedTuple):
    """The arguments of F.conv2d."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


def _convolved(conv: _Conv) -> Tensor | None:
    """The result of a convolution, or None where the kernel does not support it."""
    x, weight, bias = conv.input, conv.weight, conv.bias  # PyTorch 2.8 cannot compile a slice of a named tuple
    plain = all(map(_is_plain, (x, weight, bias))) and not torch._C._are_functorch_transforms_active()
    if not plain or isinstance(conv.padding, str):
        return None
    window = Window(_pair(conv.stride), _pair(conv.padding), _pair(conv.dilation))
    if not supports(x, weight, bias, window, conv.groups) or inside_checkpoint():
        return None
    return depthwise_conv2d(_cast(x), _cast(weight), None if bias is None else _cast(bias), window)


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether a tensor is no subclass and has no tangent: the kernel has no forward-mode derivative."""
    if tensor is None:
        return True
    return type(tensor) in (Tensor, nn.Parameter) and forward_ad.unpack_dual(tensor).tangent is None


def _pair(value: Any) -> tuple[int, int]:
    """A setting for both dimensions, which torch accepts as a number or as a sequence of one or two."""
    numbers = value if isinstance(value, (tuple, list)) else [value]
    return int(numbers[0]), int(numbers[-1])


def _cast(tensor: Tensor) -> Tensor:
    """The cast that autocast would do."""
    kind = tensor.device.type
    low = torch.is_autocast_enabled(kind) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if low else tensor

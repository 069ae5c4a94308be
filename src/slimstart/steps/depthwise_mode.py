"""Depthwise convolutions by a kernel that does for all widths (`kernels.depthwise`); cuDNN would compile for each.

The numbers are those of torch, up to rounding. Autocast does not know the kernel, so what it would cast is cast here.
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
    """Within, depthwise convolutions are done by the kernel, where it can. Modes that are to see them go inside."""

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
    """What a convolution gives, or None where the kernel cannot do it."""
    x, weight, bias = conv[:3]
    plain = all(map(_is_plain, (x, weight, bias))) and not torch._C._are_functorch_transforms_active()
    if not plain or isinstance(conv.padding, str):
        return None
    window = Window(_pair(conv.stride), _pair(conv.padding), _pair(conv.dilation))
    if not supports(x, weight, bias, window, conv.groups) or inside_checkpoint():
        return None
    return depthwise_conv2d(_cast(x), _cast(weight), None if bias is None else _cast(bias), window)


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether a tensor is torch's own, without a tangent: the kernel has no forward derivative."""
    if tensor is None:
        return True
    return type(tensor) in (Tensor, nn.Parameter) and forward_ad.unpack_dual(tensor).tangent is None


def _pair(value: Any) -> tuple[int, int]:
    """What torch understands: one number for both, alone or in a sequence, or one for each."""
    numbers = value if isinstance(value, (tuple, list)) else [value]
    return int(numbers[0]), int(numbers[-1])


def _cast(tensor: Tensor) -> Tensor:
    """As autocast would."""
    kind = tensor.device.type
    low = torch.is_autocast_enabled(kind) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if low else tensor

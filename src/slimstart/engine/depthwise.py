"""Depthwise convolutions by a kernel that does for all widths (`kernels.depthwise`), while widths are learned.

cuDNN would compile for each, and a network that is to be another one soon is not worth that.

The numbers are those of torch, up to rounding. Autocast does not know the kernel, so what it would cast is cast here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from slimstart.engine.calls import Call, Calls, inside_checkpoint
from slimstart.kernels.depthwise import Window, depthwise_conv2d, supports


def for_all_widths(call: Call) -> Call:
    """The same call; or, of a depthwise convolution that the kernel can do, the one that has it done."""
    if call.func is not F.conv2d:
        return call
    conv = _Conv(*call.args, **call.kwargs)
    plain = all(map(_is_plain, call.operands)) and not torch._C._are_functorch_transforms_active()
    if not plain or isinstance(conv.padding, str):
        return call
    window = Window(_pair(conv.stride), _pair(conv.padding), _pair(conv.dilation))
    if not supports(conv.input, conv.weight, conv.bias, window, conv.groups) or inside_checkpoint():
        return call
    tensors = [None if tensor is None else _cast(tensor) for tensor in (conv.input, conv.weight, conv.bias)]
    return call._replace(func=depthwise_conv2d, args=(*tensors, window), kwargs={})


class AllWidths(Calls):
    """Within, all calls are made `for_all_widths`."""

    def call(self, call: Call) -> Any:
        return for_all_widths(call).run()

    def expose(self, tensor: Tensor) -> None:
        pass


class _Conv(NamedTuple):
    """The arguments of F.conv2d."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, without a tangent: the kernel has no forward derivative."""
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

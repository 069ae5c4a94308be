"""What kernels that cut channels-last tensors into tiles have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_ELEMENTS = 2**31 - 2**24  # addresses are int32, and the last tile may reach behind the end


def vector(channels: int) -> int:
    """How many neighbouring elements surely belong together: up to 8, which is 16 bytes of bfloat16."""
    return math.gcd(channels, 8)


def multiprocessors(tensor: Tensor) -> int:
    """Of the device that a tensor is on."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1

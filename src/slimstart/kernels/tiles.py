"""Shared limits and sizes of kernels that cut channels-last tensors into tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_ELEMENTS = 2**31 - 2**24  # addresses are int32, and the last tile may reach past the end


def vector(channels: int) -> int:
    """Number of elements that one load can read: a divisor of the channels, at most 8 (16 bytes of bfloat16)."""
    return math.gcd(channels, 8)


def multiprocessors(tensor: Tensor) -> int:
    """Number of multiprocessors of a tensor's device; 1 on a CPU."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1

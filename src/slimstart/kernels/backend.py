"""The one place that chooses between a Triton kernel and plain torch.

Triton comes with CUDA builds of torch and is no dependency of ours. Device code lives in the files `*_triton.py`, which
are imported only where `use_triton` says yes.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

try:
    import triton
except ImportError:
    triton = None

_logger = logging.getLogger(__name__)


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` runs as a Triton kernel: on a GPU, or anywhere under TRITON_INTERPRET=1.

    Not while torch.compile traces: it fuses the plain operations itself. The first call on a device builds a kernel;
    make it, like the first of every kernel, before a CUDA graph is captured.
    """
    if triton is None or torch.compiler.is_compiling():
        return False
    return bool(triton.knobs.runtime.interpret) or (tensor.is_cuda and _builds_for(tensor.device))


@functools.cache
def _builds_for(device: torch.device) -> bool:
    """Whether kernels can be built: Triton wants a C compiler and Python's headers, and a GPU that it knows."""

    def nothing(tensor):  # type: ignore[no-untyped-def]
        pass

    try:
        with torch.cuda.device(device):
            triton.jit(nothing)[(1,)](torch.empty(1, device=device))
    except Exception as error:
        _logger.warning("Triton builds no kernels for %s, so plain torch does their work, slower: %s", device, error)
        return False
    return True

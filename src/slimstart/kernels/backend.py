"""The choice between a Triton kernel and plain torch.

Triton comes with CUDA builds of torch and is not a dependency of slimstart. Device code is in the files `*_triton.py`,
which are imported only where `use_triton` is true.
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

    Not while torch.compile traces, which fuses the plain operations itself. The first call on a device compiles a
    kernel. Like the first launch of every kernel, it must happen before a CUDA graph is captured.
    """
    if triton is None or torch.compiler.is_compiling():
        return False
    return bool(triton.knobs.runtime.interpret) or (tensor.is_cuda and _builds_for(tensor.device))


@functools.cache
def _builds_for(device: torch.device) -> bool:
    """Whether kernels can be compiled: Triton needs a C compiler, Python's headers and a supported GPU."""

    def nothing(tensor):  # type: ignore[no-untyped-def]
        pass

    try:
        with torch.cuda.device(device):
            triton.jit(nothing)[(1,)](torch.empty(1, device=device))
    except Exception as error:
        _logger.warning("Triton compiles no kernels for %s, so plain torch is used, which is slower: %s", device, error)
        return False
    return True

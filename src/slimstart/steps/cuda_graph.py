"""CUDA graphs of Python functions: run once, then captured, then replayed without Python.

A captured function has no arguments and no result: it reads and writes tensors at fixed addresses. Its first call runs
it directly, which also warms up what it uses (libraries, kernels, lazily created state); the second call captures it.
A capture executes nothing, so the captured call is replayed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from slimstart.devices import free_on_device


class Graphed:
    """A function that is captured at its second call.

    Args:
        function: works on tensors at fixed addresses, on the current stream, and reads no value on the host.
        warm: whether to capture at the first call, because the function has run before.
    """

    def __init__(self, function: Callable[[], Any], warm: bool = False) -> None:
        self._function, self._warm = function, warm
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif not self._warm:
            self._function()
            self._warm = True
        else:
            self._graph = capture(self._function)
            self._graph.replay()


def capture(function: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture what a function would launch; nothing is executed.

    `torch.cuda.graph` empties the allocator's cache first, which takes longer than many training steps. Here the cache
    is emptied only where memory is scarce.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    if is_scarce():  # the pool of a graph cannot use the allocator's cache
        torch.cuda.empty_cache()
    # The graph would read a cast that was cached before the capture, and would not contain the cast itself.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.cuda.stream(_stream()):
            # "thread_local": a data loader's pinning thread may call CUDA during the capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # the broken capture raises once more
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        # After a failed capture PyTorch would go on allocating from its pool.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    finally:
        torch.set_autocast_cache_enabled(cached)
    return graph


def is_scarce() -> bool:
    """Whether the allocator's cache holds more of the free memory than the device does."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return 2 * cached > free_on_device()


_streams: dict[int, torch.cuda.Stream] = {}


def _stream() -> torch.cuda.Stream:
    """The stream for all captures on a device.

    There is one, because autograd accumulates gradients on the stream of the forward: a backward that is captured on
    another stream would depend on work outside of its graph.
    """
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class Pool:
    """Memory for graphs. PyTorch releases a pool with its last graph, so one tiny graph keeps it alive."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._anchor = capture(partial(torch.zeros, 1, device=device), self.handle)

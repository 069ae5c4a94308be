"""Functions that run as CUDA graphs: once as they are, then captured, then replayed without Python.

A captured function has no arguments and no result: it reads and writes tensors that stay where they are. Its first call
runs it as it is, which also warms up what it uses (libraries, kernels, lazily made state); the second captures it.
Capturing executes nothing, so the captured call is replayed at once.
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
        function: works on tensors that stay where they are, on the current stream, and asks no tensor for its value.
        warm: capture at the first call already; for whoever has run the function before.
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

    `torch.cuda.graph` would empty the allocator's cache before, which costs more than many a training step; here it is
    emptied where memory is scarce.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    if is_scarce():  # what lies in the cache is lost to the pool of a graph
        torch.cuda.empty_cache()
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast that was cached before would be missing in the graph
    try:
        with torch.cuda.stream(_stream()):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # the capture is broken, and says so once more
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        # PyTorch goes on to allocate from the pool of a capture that broke off, until it is told not to.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    finally:
        torch.set_autocast_cache_enabled(cached)
    return graph


def is_scarce() -> bool:
    """Whether more of what is free lies in the allocator's cache than outside of it."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return 2 * cached > free_on_device()


_streams: dict[int, torch.cuda.Stream] = {}


def _stream() -> torch.cuda.Stream:
    """One stream per device for all captures: gradients are accumulated on the stream of their forward."""
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class Pool:
    """Memory for graphs. PyTorch gives a pool up for ever with its last graph, so one small graph stays in it."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._anchor = capture(partial(torch.zeros, 1, device=device), self.handle)

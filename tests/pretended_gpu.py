"""A GPU that is pretended: graphs are functions that run again, streams and events are nothing, tensors are the CPU's.

So all that the graph engine decides (what is captured when, what a replay reads and writes, in which order) is tested
without a GPU. What it cannot show: races, and kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from slimstart import training
from slimstart.steps import assembly, captured, optimizers, plain
from slimstart.steps import capture as capturing


class Nothing:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: True


class Graph:
    """A captured function. Capturing executes nothing that lasts; so here, nothing at all but for what it returns."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def replay(self) -> None:
        self._function()


def fuse(optimizer: Optimizer) -> bool:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    return type(optimizer) in optimizers.FUSED


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the graph engine believe in a GPU, for one test."""
    stream = Nothing()
    for name, value in {
        "Stream": Nothing,
        "Event": Nothing,
        "current_stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "graph_pool_handle": object,
        "mem_get_info": lambda *_: (80, 100),
        "memory_reserved": lambda *_: 20,
        "memory_allocated": lambda *_: 15,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "default_generators": [type("Generator", (), {"get_offset": lambda _: 0})()],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: _fork())
    for module in (capturing, captured):
        monkeypatch.setattr(module, "capture", lambda function, pool=None: Graph(function))

    def choose(engine: str, optimizer: Optimizer, device: torch.device) -> tuple[str, str | None]:
        return ("eager", "asked for") if engine == "eager" or not fuse(optimizer) else ("graphs", None)

    for where in (assembly, plain):
        monkeypatch.setattr(where, "choose", choose)
    monkeypatch.setattr(training, "fuse", fuse)
    monkeypatch.setattr(plain, "fuse_optimizer", fuse)


_real_fork = torch.random.fork_rng


def _fork() -> Any:
    return _real_fork(devices=[])

"""A simulated GPU: a graph captures a tape of operations, streams and events do nothing, tensors are on the CPU.

As on a GPU, a capture runs Python once and changes no values, and a replay runs the operations on the memory that they
had at capture, without Python. So tests find hooks that run at the wrong time and tensors whose memory was replaced.
Synchronisation with the host, and copies from it, are errors in a capture. Races between streams and errors in kernels
are not simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from slimstart.graph import ChannelGraph, Selection
from slimstart.kernels import Moves
from slimstart.steps import cuda_graph as capturing
from slimstart.steps import engine as engines
from slimstart.steps import optimizers

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default: "a number is read",
    aten.equal.default: "tensors are compared",
    aten.nonzero.default: "a shape depends on numbers",
    aten.masked_select.default: "a shape depends on numbers",
    aten.repeat_interleave.Tensor: "a shape depends on numbers",
    aten._unique2.default: "a shape depends on numbers",
}
# Their schemas do not say that running statistics are written.
WRITTEN = {aten.native_batch_norm.default: (3, 4), aten.batch_norm_update_stats.default: (1, 2)}


class Nothing:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: True


class Tape(TorchDispatchMode):
    """Operations on fixed memory; what they write while they are recorded is put back by `undo`."""

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[Callable[[], object]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # memory that was there before, and its contents
        self._own: dict[int, Tensor] = {}  # memory of this capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {WAITING[func]} by {func}")
        for written in self._written(func, args, kwargs):
            self.remember(written)
        fixed_args, fixed_kwargs = tree_map_only(Tensor, fixed, (args, kwargs))
        out = func(*args, **kwargs)
        made = [fixed(tensor) for tensor in self._made(func, out)]
        for tensor in made:
            self._own.setdefault(tensor.untyped_storage().data_ptr(), tensor)

        def launch() -> None:
            for mine, its in zip(made, self._made(func, func(*fixed_args, **fixed_kwargs)), strict=True):
                if mine.data_ptr() != its.data_ptr():
                    mine.copy_(its)

        if made or any(True for _ in self._written(func, args, kwargs)):  # otherwise it is a view
            self._launches.append(launch)
        return out

    @staticmethod
    def _made(func: Any, out: Any) -> list[Tensor]:
        """New tensors among the results of an operation."""
        returns = func._schema.returns
        found = out if len(returns) > 1 else [out] * len(returns)
        new = [one for one, returned in zip(found, returns, strict=True) if returned.alias_info is None]
        return [leaf for leaf in tree_leaves(new) if isinstance(leaf, Tensor)]

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            if (alias is not None and alias.is_write) or number in WRITTEN.get(func, ()):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

    def remember(self, tensor: Tensor) -> None:
        """Note what memory holds, before something is written to it."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._before and storage.data_ptr() not in self._own:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self._before[storage.data_ptr()] = whole, whole.clone()

    def launch(self, function: Callable[[], object]) -> None:
        """Record a kernel of ours, which is not executed now."""
        self._launches.append(function)

    def undo(self) -> None:
        for whole, value in self._before.values():
            whole.copy_(value)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for launch in self._launches:
            launch()


def fixed(tensor: Tensor) -> Tensor:
    """The memory of a tensor, whatever it gets later."""
    return tensor.detach()


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._tape = Tape()

    def capture_begin(self, **_: Any) -> None:
        assert Tape.current is None, "a capture within a capture"
        self._random = torch.get_rng_state()
        Tape.current = self._tape
        self._tape.__enter__()

    def capture_end(self) -> None:
        self._tape.__exit__(None, None, None)
        Tape.current = None
        self._tape.undo()
        torch.set_rng_state(self._random)

    def replay(self) -> None:
        assert Tape.current is None, "a replay within a capture"
        self._tape.replay()


def is_capturing() -> bool:
    return Tape.current is not None


def fuse(optimizer: Optimizer, device: torch.device | None = None) -> bool:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return type(optimizer) in optimizers.FUSED


def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU for one test of the graph engine."""
    stream = Nothing()
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Nothing,
        "Event": Nothing,
        "current_stream": lambda *_: stream,
        "current_device": lambda: 0,
        "stream": lambda _: nullcontext(),
        "synchronize": _synchronize,
        "graph_pool_handle": object,
        "mem_get_info": lambda *_: (80, 100),
        "memory_reserved": lambda *_: 20,
        "memory_allocated": lambda *_: 15,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "default_generators": [type("Generator", (), {"get_offset": lambda _: 0})()],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(capturing, "_streams", {})
    monkeypatch.setattr(Tape, "current", None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: _fork())
    _watch_the_host(monkeypatch)
    _launch_moves(monkeypatch)

    def reason_for_eager(engine: str, optimizer: Optimizer, device: torch.device) -> str | None:
        return "asked for" if engine == "eager" or not fuse(optimizer) else None

    replaced = {engines.reason_for_eager: reason_for_eager, optimizers.fuse: fuse}
    for module in [module for name, module in sys.modules.items() if name.startswith("slimstart.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in replaced:  # wherever it is known
                monkeypatch.setattr(module, name, replaced[value])


def _synchronize(*_: Any) -> None:
    if is_capturing():
        raise RuntimeError("operation not permitted when stream is capturing: the host waits for the device")


def _watch_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all memory is the host's, so a copy to the other side is not seen: what the host computes for it is."""
    for owner, name in (
        (Tensor, "cpu"),
        (ChannelGraph, "select"),
        (ChannelGraph, "units_along"),
        (Selection, "positions"),
    ):
        method = getattr(owner, name)

        def watched(it: Any, *args: Any, method: Any = method, **kwargs: Any) -> Any:
            _synchronize()
            return method(it, *args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


def _launch_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move is one kernel on a GPU. In plain torch it asks how many positions are padding."""
    for name in ("gather_", "scatter_"):
        move = getattr(Moves, name)

        def launched(moves: Moves, row: Tensor, move: Any = move) -> None:
            if Tape.current is None:
                move(moves, row)
            else:
                row = fixed(row)
                moves._check(row)
                Tape.current.launch(lambda: move(moves, row))

        monkeypatch.setattr(Moves, name, launched)


_real_fork = torch.random.fork_rng


def _fork() -> Any:
    return _real_fork(devices=[])

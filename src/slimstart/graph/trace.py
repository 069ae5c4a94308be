"""trace(model, example_inputs) -> ChannelGraph: run the user's own forward once per mode and solve what it says.

The model is not touched: a copy of it is run. Its forward may be any Python; what it does to
tensors is followed by operation (`tracer.py`, `rules/`), what sizes it computes by `sizes.py`.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_map

from slimstart.devices import cuda_devices
from slimstart.errors import TraceError
from slimstart.graph.channels import ChannelGraph
from slimstart.graph.constraints import Ledger
from slimstart.graph.rules import rule_for
from slimstart.graph.sizes import Attribute, Size
from slimstart.graph.solve import solve
from slimstart.graph.tracer import Tracer
from slimstart.inputs import as_call

COUPLINGS = ("filter", "stream")
_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    nn.Embedding, nn.PReLU, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, _BatchNorm, _InstanceNorm,
)  # fmt: skip

logger = logging.getLogger(__name__)


def trace(
    model: nn.Module,
    example_inputs: Any,
    coupling: str = "stream",
    keep: Iterable[str] = (),
    without: Iterable[tuple[str, str]] = (),
) -> ChannelGraph:
    """Find out which channels of a model can be removed, and what goes with them.

    Args:
        model: any module; its forward is ordinary Python.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments. Costs are counted
            for these inputs.
        coupling: "filter", every filter has its own mask, also where several layers write into one residual stream; or
            "stream", all writers of a stream share one.
        keep: names of modules or parameters whose filters stay whole.
        without: more of the same as (layer, reason), for callers that found a layer wanting.

    Raises:
        TraceError: if the forward fails on the example inputs.
    """
    if coupling not in COUPLINGS:
        raise ValueError(f"`coupling` is {coupling!r}; it must be one of {', '.join(map(repr, COUPLINGS))}")
    args, kwargs = as_call(example_inputs)
    asked = [keep] if isinstance(keep, str) else list(keep)
    reasons = dict.fromkeys(asked, "asked for by `keep`") | dict(without)
    known = {n for n, _ in model.named_modules()} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    if unknown := sorted(set(asked) - known):
        raise ValueError(f"`keep` names {unknown}, but the model has no module or parameter of that name")
    ledger = Ledger(coupling)
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise TraceError(f"the model cannot be copied: {error}") from error
    with _no_garbage_collection():
        reached = _run(twin, args, kwargs, ledger, training=False)
        try:  # parts that only run in training (auxiliary heads) read channels too
            reached |= _run_in_training(twin, args, kwargs, ledger)
        except TraceError as error:
            logger.warning("the forward in training mode could not be followed, so it is not proven: %s", error)
        for name, module in model.named_modules():
            if name not in reached and any(True for _ in module.parameters(recurse=False)):
                ledger.unfollowed.setdefault(name, "not reached with `example_inputs`")
        return solve(ledger, model, reasons)


def _run_in_training(twin: nn.Module, args: Any, kwargs: Any, ledger: Ledger) -> set[str]:
    """Follow the forward in training mode; batch statistics of a single example fail, so a second try has two."""

    def twice(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf

    try:
        return _run(twin, args, kwargs, ledger, training=True)
    except TraceError:
        return _run(twin, tree_map(twice, args), tree_map(twice, kwargs), ledger, training=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A trace makes millions of small objects and no cycles; looking for some would double its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(twin: nn.Module, args: Any, kwargs: Any, ledger: Ledger, training: bool) -> set[str]:
    """Follow one forward of a copy of the model; costs are counted in evaluation mode only.

    Returns:
        The names of the modules that were run, or of which a parameter was used all the same (by a fused layer).
    """
    twin.train(training)
    named = [*twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False)]
    names: dict[int, str] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), name)
    native = {name: module for name, module in twin.named_modules() if _is_native(module)}
    # The fused forward of these reads the weights of its layers and never calls them.
    fused = [name for name, module in twin.named_modules() if isinstance(module, nn.TransformerEncoderLayer)]
    portable = {name for name in native if not any(name.startswith(parent + ".") or not parent for parent in fused)}
    sizes = {n: t.shape for n, t in named}
    tracer = Tracer(ledger, names, sizes, native, portable, rule_for, count_costs=not training)
    for name, module in twin.named_modules():
        if not type(module).__module__.startswith("torch."):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, int) and not isinstance(value, bool) and int(value) > 0:
                    size = Size(int(value), Attribute(name, attribute, int(value)), tracer.size_used_as_number)
                    module.__dict__[attribute] = size
    try:
        with torch.random.fork_rng(devices=cuda_devices(twin)), tracer.listening(twin):
            outputs = twin(*args, **kwargs)
    except Exception as error:
        raise TraceError(f"the model's forward fails on `example_inputs`: {type(error).__name__}: {error}") from error
    for tensor in _tensors_in(outputs):
        if (value := tracer.activation(tensor)) is not None:
            ledger.freeze(value.nodes, "it is an output of the network")
    parameters = twin.named_parameters(remove_duplicate=False)
    used = {name.rpartition(".")[0] for name, tensor in parameters if names[id(tensor)] in tracer.used}
    return tracer.reached | used


def _is_native(module: nn.Module) -> bool:
    """Whether the module is one of PyTorch's own layers, or a subclass that does not change what it computes."""
    base = next((layer for layer in _LAYERS if isinstance(module, layer)), None)
    unchanged = base is not None and type(module).forward is base.forward
    return unchanged or getattr(type(module), "same_as_base", False) or isinstance(module, nn.SyncBatchNorm)


def _tensors_in(outputs: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif depth > 0:
        if isinstance(outputs, dict):
            inner = list(outputs.values())
        elif isinstance(outputs, list | tuple | set):
            inner = list(outputs)
        elif is_dataclass(outputs):
            inner = [getattr(outputs, f.name) for f in fields(outputs)]
        else:
            inner = list(getattr(outputs, "__dict__", {}).values())
        for item in inner:
            yield from _tensors_in(item, depth - 1)

"""Verification: narrow networks are compared with masked dense ones.

The comparison does not depend on how the graph was found. It takes a copy of the model with random parameters and
statistics (newly initialised ones hide errors, such as normalisation weights of zero), draws uneven masks, and compares
outputs, gradients and statistics of `compact(model, selection)` with those of the same model in which everything that
the selection drops is zero, in training and in evaluation mode, in float64.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from slimstart.devices import seeded
from slimstart.errors import TraceError
from slimstart.graph import ChannelGraph, ChannelGroup, Port, RemovableLayer, Selection, trace
from slimstart.inputs import as_call
from slimstart.narrow.compact import compact, masked, tensor_names

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """The outcome of `verify`.

    Attributes:
        max_error: the largest difference, relative to the largest value of its tensor (at least 1).
        worst: the tensor with this difference.
        num_comparisons: the number of tensors that were compared.
    """

    max_error: float
    worst: str
    num_comparisons: int
    graph: ChannelGraph


def verify(
    model: nn.Module,
    example_inputs: Any,
    coupling: str = "stream",
    keep: Iterable[str] = (),
    num_masks: int = 3,
    seed: int = 0,
    norms: str = "keep",
) -> Report:
    """Trace a model and compare narrow networks, also without some of their layers, with masked dense ones.

    Args:
        model: as for `trace`; so are the next three.
        example_inputs: inputs of the model.
        coupling: "stream" or "filter".
        keep: names of modules or parameters that are not narrowed.
        num_masks: number of random masks, each in both modes.
        seed: seed of masks and random parameters.
        norms: as for `trace`; with "shrink", norms and means over channels of the dense network run over those that are
            kept.

    Raises:
        TraceError: a narrow network differs from the masked dense one.
    """
    graph = trace(model, example_inputs, coupling, keep, norms=norms)
    graph = _without_untrainable(model, graph, graph.layers, example_inputs)
    return prove(model, graph, example_inputs, num_masks=num_masks, layers=graph.layers, seed=seed)


def prove(
    model: nn.Module,
    graph: ChannelGraph,
    example_inputs: Any,
    num_masks: int = 1,
    gradients: bool = True,
    groups: Sequence[ChannelGroup] | None = None,
    layers: Sequence[RemovableLayer] = (),
    seed: int = 0,
) -> Report:
    """Compare narrow networks of a given graph with masked dense ones.

    Args:
        groups: those that lose units; all by default.
        layers: those that are removed: with the first mask none, with the second all, with the others some.
    """
    generator = torch.Generator().manual_seed(seed)
    model, inputs = _prepared(model, graph, example_inputs, generator)
    errors: dict[str, float] = {"": 0.0}
    compared = 0
    dtype = _dtype(model)
    for number in range(num_masks):
        gone = _some_layers(layers, number, generator)
        mask = _uneven_mask(graph, graph.groups if groups is None else groups, generator)
        selection = graph.without(gone).select(mask)
        try:
            dense, narrow = masked(model, selection), compact(model, selection)
        except Exception as failure:
            raise TraceError(
                f"mask {number} cannot be cut out: {type(failure).__name__}: {failure}; name the layers concerned in "
                "`keep`, and their channels are not removed"
            ) from failure
        for training in (False, True):
            name = f"mask {number}, {'training' if training else 'evaluation'} mode"
            differentiable = gradients
            with _watching_unread(dense, selection) as unread:
                reference = _run(dense, inputs, training, differentiable)
                # Some layers have no backward in evaluation mode; compare outputs only. (In training mode a second
                # forward would update the statistics twice.)
                if isinstance(reference, Exception) and gradients and not training:
                    differentiable = False
                    reference = _run(dense, inputs, training, differentiable)
            if isinstance(reference, Exception):
                if not training:
                    raise TraceError(
                        f"the dense network itself fails on `example_inputs`: {type(reference).__name__}: {reference}"
                    ) from reference
                if isinstance(_run(copy.deepcopy(model), inputs, training, gradients), Exception):
                    continue  # batch statistics of a single value: nothing to compare
                raise TraceError(
                    f"the masked dense network fails ({name}): {type(reference).__name__}: {reference}; name the "
                    f"layers concerned in `keep`: {', '.join(gone) or 'none are removed'}"
                ) from reference
            if any(bool(t.isnan().any()) for t in reference.outputs):
                raise TraceError(
                    f"the dense network's output is NaN ({name}), so there is nothing to compare; try other "
                    "`example_inputs`"
                )
            found = _run(narrow, inputs, training, differentiable)
            if isinstance(found, Exception):
                raise TraceError(
                    f"the narrow network fails ({name}): {type(found).__name__}: {found}; name the layers concerned in "
                    "`keep`, and their channels are not removed"
                ) from found
            for where, error in (*_differences(selection, dense, narrow, reference, found), *unread):
                errors[f"{where} ({name})"] = error
                compared += 1
    worst = max(errors, key=errors.__getitem__)
    report = Report(errors[worst], worst, compared, graph)
    if not report.max_error <= TOLERANCE.get(dtype, 1e-1):
        raise TraceError(
            f"the narrow network is not the masked dense one: {worst} differs by {report.max_error:.2g}; "
            f"name the layers concerned in `keep`, and their channels are not removed{_doubt(inputs)}"
        )
    return report


def _doubt(inputs: Any) -> str:
    """A reason to repeat a comparison that failed: gradients of batch norm are wrong in PyTorch 2.13 on a CPU."""
    first = next((leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim() > 0), None)
    if first is None or first.device.type != "cpu" or len(first) != 1:
        return ""
    return ". With one example, gradients of batch norm on a CPU may be wrong: give `example_inputs` with two"


def trace_verified(
    model: nn.Module, example_inputs: Any, coupling: str = "stream", keep: Iterable[str] = (), norms: str = "keep"
) -> ChannelGraph:
    """Trace a model, and make every group not prunable that fails the comparison, with the reason."""
    without: list[tuple[str, str]] = []
    keep = [keep] if isinstance(keep, str) else list(keep)
    while True:
        graph = trace(model, example_inputs, coupling, keep, without, norms)

        def check(groups: Sequence[ChannelGroup], graph: ChannelGraph = graph) -> None:
            prove(model, graph, example_inputs, gradients=False, groups=groups)

        failed = _failing(graph.groups, check)
        if not failed:
            return graph
        for group, error in failed:
            reason = f"its slices could not be proven right: {error}"
            logger.warning("%s is not prunable: %s", group.name, reason)
            without += [(layer, reason) for layer in group.layers]


def without_verified(
    model: nn.Module, graph: ChannelGraph, layers: Sequence[RemovableLayer], example_inputs: Any
) -> ChannelGraph:
    """The graph, in which those of some layers cannot go that fail the comparison, with the reason."""

    def check(gone: Sequence[RemovableLayer]) -> None:
        prove(model, graph.without(layer.name for layer in gone), example_inputs, gradients=False)

    graph = _without_untrainable(model, graph, layers, example_inputs)
    kept = {layer.name for layer in graph.layers}
    return _keeping(graph, _failing([layer for layer in layers if layer.name in kept], check))


def _without_untrainable(
    model: nn.Module, graph: ChannelGraph, layers: Sequence[RemovableLayer], example_inputs: Any
) -> ChannelGraph:
    """The graph, in which those of some layers cannot go without which a backward fails, with the reason.

    The identity returns its input itself. If what follows writes in place, it may overwrite what the backward needs.
    """
    inputs = as_call(example_inputs)
    everything = torch.ones(graph.num_units, dtype=torch.bool)

    def check(gone: Sequence[RemovableLayer]) -> None:
        network = compact(model, graph.without(layer.name for layer in gone).select(everything))
        if isinstance(_run(network, inputs, training=True, gradients=False), Exception):
            return  # a wrong graph, which the comparison finds
        failure = _run(network, inputs, training=True, gradients=True)
        if isinstance(failure, Exception):
            reason = f"{type(failure).__name__}: {failure}"
            if "modified by an inplace operation" in reason:
                reason = "what follows it writes in place; use `inplace=False` there"
            raise TraceError(f"its backward fails: {reason}") from failure

    if not layers or isinstance(_run(copy.deepcopy(model), inputs, training=True, gradients=True), Exception):
        return graph
    return _keeping(graph, _failing(layers, check))


def _keeping(graph: ChannelGraph, failed: Iterable[tuple[RemovableLayer, TraceError]]) -> ChannelGraph:
    reasons = {  # without the advice of `prove` to name layers in `keep`: it is followed here
        layer.name: f"the network without it is not right: {str(error).partition('; name the layers')[0]}"
        for layer, error in failed
    }
    for name, reason in reasons.items():
        logger.warning("%s cannot be removed: %s", name, reason)
    return graph.keeping(reasons)


_Item = TypeVar("_Item")


def _failing(items: Sequence[_Item], check: Callable[[Sequence[_Item]], Any]) -> list[tuple[_Item, TraceError]]:
    """The items, groups or layers, that make a narrow network differ, found by bisection."""
    if not items:
        return []
    try:
        check(items)
    except TraceError as error:
        if len(items) == 1:
            return [(items[0], error)]
        half = len(items) // 2
        failed = [*_failing(items[:half], check), *_failing(items[half:], check)]
        # Each half may be right and both together wrong: then all of them are refused.
        return failed or [(item, error) for item in items]
    return []


def _prepared(
    model: nn.Module, graph: ChannelGraph, example_inputs: Any, generator: torch.Generator
) -> tuple[nn.Module, Any]:
    """A randomised copy in float64, with inputs to match (in the model's own type where float64 does not run)."""
    inputs = as_call(example_inputs)

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    copied, own_inputs = copy.deepcopy(model).double(), tree_map(double, inputs)
    _randomise(copied, graph, generator)
    if isinstance(_run(copied, own_inputs, training=False, gradients=False), Exception):
        copied, own_inputs = copy.deepcopy(model), inputs
        _randomise(copied, graph, generator)
    outcome = _run(copied, own_inputs, training=False, gradients=False)
    if not isinstance(outcome, Exception) and any(bool(t.isnan().any()) for t in outcome.outputs):
        copied = copy.deepcopy(model).to(_dtype(copied))  # not with random parameters, which give NaN
    return copied, own_inputs


def _dtype(model: nn.Module) -> torch.dtype:
    return next((t.dtype for t in model.parameters() if t.is_floating_point()), torch.float64)


@torch.no_grad()
def _randomise(model: nn.Module, graph: ChannelGraph, generator: torch.Generator) -> None:
    """Set parameters and buffers with channels to random values: matrices of unit gain, vectors around 1."""
    for name, tensor in tensor_names(model).items():
        if tensor.is_floating_point() and (isinstance(tensor, nn.Parameter) or name in graph.tensors):
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.dim() > 1:
                values = (values - 0.5) * (12.0 / max(1, math.prod(tensor.shape[1:]))) ** 0.5
            else:
                values = 0.5 + values
            tensor.copy_(values)


def _uneven_mask(graph: ChannelGraph, groups: Sequence[ChannelGroup], generator: torch.Generator) -> Tensor:
    """A mask with another keep ratio for every group; at least one unit is dropped wherever one can be."""
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    for group in groups:
        ratio = 0.2 + 0.5 * torch.rand((), generator=generator)
        kept = torch.rand(len(group.units), generator=generator) < ratio
        kept[torch.randint(len(group.units), (1,), generator=generator)] = False
        mask[group.units.start : group.units.stop] = kept
    return mask


def _some_layers(layers: Sequence[RemovableLayer], number: int, generator: torch.Generator) -> list[str]:
    """The layers to remove with mask `number`."""
    chosen = torch.rand(len(layers), generator=generator) < (0.0, 1.1, 0.5)[min(number, 2)]
    return [layer.name for layer, gone in zip(layers, chosen.tolist(), strict=True) if gone]


@dataclass
class _Outcome:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def _run(model: nn.Module, inputs: Any, training: bool, gradients: bool) -> _Outcome | Exception:
    """Outputs of one forward, and gradients of a fixed function of them."""
    args, kwargs = copy.deepcopy(inputs)
    model.train()  # clears what some modules cache in evaluation mode
    model.train(training)
    model.zero_grad()
    try:
        precision = _InDouble() if _dtype(model) == torch.float64 else nullcontext()
        with seeded(model), torch.set_grad_enabled(gradients), _NoDropout(), precision:
            outputs = [t for t in tree_flatten(model(*args, **kwargs))[0] if isinstance(t, Tensor)]
        floating = [t for t in outputs if t.is_floating_point() and t.requires_grad]
        if gradients and floating:
            total = torch.stack([(t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t)).sum() for t in floating])
            total.sum().backward()
    except Exception as error:
        return error
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return _Outcome([t.detach() for t in outputs], found)


def _differences(
    selection: Selection, dense: nn.Module, narrow: nn.Module, reference: _Outcome, found: _Outcome
) -> Iterator[tuple[str, float]]:
    """Names and differences of all tensors of two runs."""
    for index, (expected, actual) in enumerate(zip(reference.outputs, found.outputs, strict=True)):
        yield f"output {index}", _error(expected, actual)
    for name, gradient in reference.gradients.items():
        expected = selection.gather(name, gradient)
        yield f"gradient of {name}", _error(expected, found.gradients.get(name, torch.zeros_like(expected)))
    buffers = dict(narrow.named_buffers())
    for name, buffer in dense.named_buffers():
        if any(layer.has(name) for layer in selection.graph.removed):
            continue
        yield f"buffer {name}", _error(selection.gather(name, buffer), buffers[name])


@contextmanager
def _watching_unread(dense: nn.Module, selection: Selection) -> Iterator[list[tuple[str, float]]]:
    """Check that the channels of a stream that a layer does not read are dropped ones.

    Outputs alone do not show it: the masked network has zeros in the reader's columns for these channels, so it agrees
    with a reader that misses a live channel. But a dropped channel has the same value at every entry: zero, or what
    pointwise operations make of zero.
    """
    found: list[tuple[str, float]] = []

    def watch(name: str, port: Port, layer: nn.Module, args: tuple[Any, ...]) -> None:
        unread = (~selection.present(port.live)).nonzero().squeeze(1)
        if args[0].shape[port.dim] != selection.present(port.live).numel():
            found.append((f"the width of the stream before {name}", float("inf")))
        elif unread.numel():
            channels = (
                args[0].detach().index_select(port.dim, unread.to(args[0].device)).movedim(port.dim, 0).flatten(1)
            )
            found.append((f"what {name} leaves unread", float((channels.amax(1) - channels.amin(1)).max())))

    handles = [
        dense.get_submodule(name).register_forward_pre_hook(partial(watch, name, port))
        for name, port in selection.graph.reads.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _error(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    if expected.numel() == 0 or not expected.is_floating_point():
        return 0.0 if torch.equal(expected, actual) else float("inf")
    expected, actual = expected.double(), actual.double()
    same = (expected == actual) | (expected.isnan() & actual.isnan())  # also infinities
    difference = torch.where(same, torch.zeros_like(expected), (expected - actual).abs()).max()
    scale = expected[expected.isfinite()].abs().max() if bool(expected.isfinite().any()) else torch.ones(())
    error = float(difference / scale.clamp(min=1.0))
    return error if error == error else float("inf")


class _NoDropout(TorchFunctionMode):
    """Skip dropout, which draws one number per entry, so that two widths would get different ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        elif name == "multi_head_attention_forward":
            kwargs["training"] = False
        return func(*args, **kwargs)


class _InDouble(TorchFunctionMode):
    """Replace casts to float32, as before the norms of many transformers: their rounding would hide small errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "float":
            return args[0].double()
        if name != "view":  # which reads the same memory as another type
            args, kwargs = tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs))
        return func(*args, **(kwargs or {}))

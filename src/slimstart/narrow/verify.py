"""Proof that a slice is right: the narrow network equals the masked dense one.

The comparison knows nothing of how the graph was found. It takes a copy of the model with randomised parameters and
statistics (a fresh network hides errors: zero-initialised normalisation weights, default rows), draws uneven masks, and
compares outputs, gradients and statistics of `compact(model, selection)` with those of the same model in which
everything that the selection drops is zero, in training and in evaluation mode, in float64.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from slimstart.devices import cuda_devices
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
        max_error: the largest difference, relative to the largest value of the tensor it was found in (at least 1).
        worst: where it was found.
        num_comparisons: how many tensors were compared.
        graph: the graph that was proven.
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
) -> Report:
    """Trace a model and compare narrow networks, also without some of their layers, with masked dense ones.

    Args:
        model: as for `trace`; so are the next three.
        example_inputs: inputs of the model.
        coupling: "stream" or "filter".
        keep: names of modules or parameters that are not narrowed.
        num_masks: how many random masks to try, in both modes.
        seed: of masks and random parameters.

    Raises:
        TraceError: where a narrow network is not what it must be.
    """
    graph = trace(model, example_inputs, coupling, keep)
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
            raise TraceError(f"mask {number} cannot be cut out: {type(failure).__name__}: {failure}") from failure
        for training in (False, True):
            name = f"mask {number}, {'training' if training else 'evaluation'} mode"
            differentiable = gradients
            with _watching_unread(dense, selection) as unread:
                reference = _run(dense, inputs, training, differentiable)
                # Some layers have no backward in evaluation mode. (In training mode a second forward would have moved
                # the statistics twice.)
                if isinstance(reference, Exception) and gradients and not training:
                    differentiable = False
                    reference = _run(dense, inputs, training, differentiable)
            if isinstance(reference, Exception):
                if not training:
                    raise TraceError(f"the dense network itself fails: {reference}") from reference
                continue  # batch statistics of a single value: nothing to compare
            if any(bool(t.isnan().any()) for t in reference.outputs):
                raise TraceError(f"the dense network's output is NaN ({name}): nothing can be proven")
            found = _run(narrow, inputs, training, differentiable)
            if isinstance(found, Exception):
                raise TraceError(f"the narrow network fails ({name}): {type(found).__name__}: {found}") from found
            for where, error in (*_differences(selection, dense, narrow, reference, found), *unread):
                errors[f"{where} ({name})"] = error
                compared += 1
    worst = max(errors, key=errors.__getitem__)
    report = Report(errors[worst], worst, compared, graph)
    if not report.max_error <= TOLERANCE.get(dtype, 1e-1):
        raise TraceError(
            f"the narrow network is not the masked dense one: {worst} differs by {report.max_error:.2g}; "
            "name the layers concerned in `keep` to leave them whole"
        )
    return report


def trace_verified(
    model: nn.Module, example_inputs: Any, coupling: str = "stream", keep: Iterable[str] = ()
) -> ChannelGraph:
    """Trace a model, and leave whole every group that cannot be proven right, with the reason."""
    without: list[tuple[str, str]] = []
    keep = [keep] if isinstance(keep, str) else list(keep)
    while True:
        graph = trace(model, example_inputs, coupling, keep, without)
        failed = _failing(model, graph, example_inputs, graph.groups)
        if not failed:
            return graph
        for group, reason in failed:
            logger.warning("%s is left whole: %s", group.name, reason)
            without += [(layer, reason) for layer in group.layers]


def _failing(
    model: nn.Module, graph: ChannelGraph, example_inputs: Any, groups: Sequence[ChannelGroup]
) -> list[tuple[ChannelGroup, str]]:
    """The groups that make a narrow network wrong, found by halving."""
    if not groups:
        return []
    try:
        prove(model, graph, example_inputs, gradients=False, groups=groups)
    except TraceError as error:
        if len(groups) == 1:
            return [(groups[0], f"its slices could not be proven right: {error}")]
        half = len(groups) // 2
        failed = [
            *_failing(model, graph, example_inputs, groups[:half]),
            *_failing(model, graph, example_inputs, groups[half:]),
        ]
        # Each half may be right alone and wrong with the other: then neither is trusted.
        return failed or [(group, f"its slices could not be proven right: {error}") for group in groups]
    return []


def _prepared(
    model: nn.Module, graph: ChannelGraph, example_inputs: Any, generator: torch.Generator
) -> tuple[nn.Module, Any]:
    """A randomised copy in float64, with inputs to match (in the model's own type where float64 does not run)."""
    inputs = as_call(example_inputs)

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    twin, twin_inputs = copy.deepcopy(model).double(), tree_map(double, inputs)
    _randomise(twin, graph, generator)
    if isinstance(_run(twin, twin_inputs, training=False, gradients=False), Exception):
        twin, twin_inputs = copy.deepcopy(model), inputs
        _randomise(twin, graph, generator)
    outcome = _run(twin, twin_inputs, training=False, gradients=False)
    if not isinstance(outcome, Exception) and any(bool(t.isnan().any()) for t in outcome.outputs):
        twin = copy.deepcopy(model).to(_dtype(twin))  # random parameters are nonsense here, and NaN proves nothing
    return twin, twin_inputs


def _dtype(model: nn.Module) -> torch.dtype:
    return next((t.dtype for t in model.parameters() if t.is_floating_point()), torch.float64)


@torch.no_grad()
def _randomise(model: nn.Module, graph: ChannelGraph, generator: torch.Generator) -> None:
    """Parameters, and buffers with channels, get values that hide nothing: matrices of unit gain, vectors about 1."""
    for name, tensor in tensor_names(model).items():
        if tensor.is_floating_point() and (isinstance(tensor, nn.Parameter) or name in graph.tensors):
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.dim() > 1:
                values = (values - 0.5) * (12.0 / (tensor.numel() / tensor.shape[0])) ** 0.5
            else:
                values = 0.5 + values
            tensor.copy_(values)


def _uneven_mask(graph: ChannelGraph, groups: Sequence[ChannelGroup], generator: torch.Generator) -> Tensor:
    """Every group with a keep ratio of its own; at least one unit goes wherever one can."""
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
    model.train(training)
    model.zero_grad()
    try:
        forked = torch.random.fork_rng(devices=cuda_devices(model))
        with forked, torch.set_grad_enabled(gradients), _NoDropout():
            torch.manual_seed(0)
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
    """Where two runs were compared, and by how much they differ."""
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
    """Whether layers on a stream leave unread only what is dropped.

    The masked network has zeros in the columns of every reader, so it agrees with a reader that misses a live channel.
    But a channel that nobody writes is zero, or what the operations within it make of a zero: the same everywhere.
    """
    found: list[tuple[str, float]] = []

    def watch(name: str, port: Port, layer: nn.Module, args: tuple[Any, ...]) -> None:
        unread = (~selection.present(port.live)).nonzero().squeeze(1)
        if args[0].shape[port.dim] != selection.present(port.live).numel():
            found.append((f"the stream before {name}", float("inf")))
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
    """Dropout draws one number per entry, so two widths would draw different ones: leave it out."""

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

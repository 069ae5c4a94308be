"""trace(model, example_inputs) -> ChannelGraph: run the user's own forward once per mode and follow its channels.

The model is not changed: a copy of it is run. Its forward may be any Python, with real values, so that control flow
which depends on data takes its ordinary branch. Two modes of PyTorch see what it does:

- a dispatch mode sees every operation with its tensors. Under inference mode composite operations (`linear`, `chunk`,
  `scaled_dot_product_attention`) arrive in one piece; one without a rule is decomposed into those that have rules.
- a function mode above it returns `Size` objects for `tensor.shape`, and records the sizes with which a function was
  called, because the dispatcher would convert them to plain integers.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from slimstart.devices import seeded
from slimstart.errors import TraceError
from slimstart.graph.build import build_graph
from slimstart.graph.channels import ChannelGraph
from slimstart.graph.constraints import Constraints
from slimstart.graph.flow import Flow, ModuleCall, Seen
from slimstart.graph.multihead import follow_heads
from slimstart.graph.rules import rule_for
from slimstart.graph.sizes import Dimension, Shape, Size, plain
from slimstart.graph.tracer import OVER_CHANNELS, Call, Tracer, bind
from slimstart.inputs import as_call

COUPLINGS = ("filter", "stream")
NORMS = ("keep", "shrink")
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
    norms: str = "keep",
) -> ChannelGraph:
    """Find out which channels of a model can be removed, and which tensor slices belong to them.

    Args:
        model: any module; its forward is ordinary Python.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments. Costs are counted
            for these inputs.
        coupling: "filter", every filter has its own mask, also where several layers write into one residual stream; or
            "stream", all writers of a stream share one.
        keep: names of modules or parameters whose filters are all kept.
        without: further layers to keep, as (layer, reason).
        norms: what layer and RMS norms and means over channels do. "keep": all their channels are kept, so a narrow
            network is the dense one with zeros. "shrink": their channels can be removed, and they run over those that
            are left; for networks that are trained from scratch. The default scale of attention with one head is alike.

    Raises:
        TraceError: if the forward fails on the example inputs.
    """
    if coupling not in COUPLINGS:
        raise ValueError(f"`coupling` is {coupling!r}; it must be one of {', '.join(map(repr, COUPLINGS))}")
    if norms not in NORMS:
        raise ValueError(f"`norms` is {norms!r}; it must be one of {', '.join(map(repr, NORMS))}")
    args, kwargs = as_call(example_inputs)
    asked = [keep] if isinstance(keep, str) else list(keep)
    reasons = dict.fromkeys(asked, "asked for by `keep`") | dict(without)
    known = {n for n, _ in model.named_modules()} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    if unknown := sorted(set(asked) - known):
        raise ValueError(
            f"`keep` names {unknown}, but the model has no module or parameter of that name; names are those of "
            "`model.named_modules()` and `model.named_parameters()`"
        )
    constraints = Constraints(coupling, norms)
    graph = _traced(model, args, kwargs, constraints, reasons)
    while whole := constraints.over_channels.keys() - graph.over_channels.keys():
        # Norms of which no channel can be removed: where they are known to need all channels, a layer that writes into
        # their stream may still drop filters, since zeros remain in its place.
        constraints = Constraints(coupling, norms, constraints.whole_norms | whole)
        again = _traced(model, args, kwargs, constraints, reasons)
        if again.num_units <= graph.num_units:
            break
        graph = again
    return graph


def _traced(
    model: nn.Module, args: Any, kwargs: Any, constraints: Constraints, reasons: Mapping[str, str]
) -> ChannelGraph:
    """The graph of a model; arguments as for `trace`.

    Args:
        constraints: empty ones.
        reasons: {name of a module or parameter: why its filters are not prunable}.
    """
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise TraceError(f"the model cannot be copied: {error}; it must work with copy.deepcopy") from error
    with _no_garbage_collection():
        reached = _run(copied, args, kwargs, constraints, training=False)
        try:  # parts that run only in training mode (auxiliary heads) read channels too
            reached |= _run_in_training(copied, args, kwargs, constraints)
        except TraceError as error:
            del constraints.flows[True]
            logger.warning(
                "the forward in training mode could not be traced, so layers that run only there are not followed: %s",
                error,
            )
        for name, module in model.named_modules():
            if name not in reached and any(True for _ in module.parameters(recurse=False)):
                constraints.unfollowed.setdefault(name, "not reached with `example_inputs`")
        constraints.resolve()
        return build_graph(constraints, model, reasons)


def _run_in_training(copied: nn.Module, args: Any, kwargs: Any, constraints: Constraints) -> set[str]:
    """Follow the forward in training mode; if it fails, with every input twice: batch statistics need two examples."""

    def twice(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf

    try:
        return _run(copied, args, kwargs, constraints, training=True)
    except TraceError:
        return _run(copied, tree_map(twice, args), tree_map(twice, kwargs), constraints, training=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A trace makes millions of small objects and no reference cycles; garbage collection would double its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(copied: nn.Module, args: Any, kwargs: Any, constraints: Constraints, training: bool) -> set[str]:
    """Follow one forward of a copy of the model; costs are counted in evaluation mode only.

    Returns:
        The names of the modules that were run, or whose parameters were used without (by a fused layer).
    """
    copied.train()  # clears what some modules cache in evaluation mode
    copied.train(training)
    named = [*copied.named_parameters(remove_duplicate=False), *copied.named_buffers(remove_duplicate=False)]
    names: dict[int, str] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), name)
    native = {name: module for name, module in copied.named_modules() if _is_native(module)}
    # The fused forward of these reads the weights of its layers without calling them, so ports would have no effect.
    fused = [name for name, module in copied.named_modules() if isinstance(module, nn.TransformerEncoderLayer)]
    portable = {name for name in native if not any(name.startswith(parent + ".") or not parent for parent in fused)}
    sizes = {n: t.shape for n, t in named}
    saved = copied.state_dict(keep_vars=True)
    unsaved = frozenset(name for name, _ in copied.named_buffers() if name not in saved)
    flow = constraints.flows[training] = Flow()
    tracer = Tracer(constraints, names, sizes, native, portable, rule_for, training, flow, unsaved)
    for name, module in copied.named_modules():
        # The layers of PyTorch follow their tensors; its whole transformer compares its attribute with the input.
        if not type(module).__module__.startswith("torch.") or isinstance(module, nn.Transformer):
            for attribute, value in list(vars(module).items()):
                if _is_count(value):
                    module.__dict__[attribute] = tracer.size_of_attribute(name, attribute, value)
                elif type(value) in (list, tuple) and value and all(map(_is_count, value)):
                    entries = [tracer.size_of_attribute(name, f"{attribute}[{i}]", v) for i, v in enumerate(value)]
                    module.__dict__[attribute] = type(value)(entries)
                elif _is_configuration(value):
                    module.__dict__[attribute] = own = copy.copy(value)  # other modules may have the same one
                    for inner, count in list(vars(own).items()):
                        if _is_count(count):
                            vars(own)[inner] = tracer.size_of_attribute(name, f"{attribute}.{inner}", count)
        elif isinstance(module, nn.MultiheadAttention):
            follow_heads(tracer, name, module)
    tracer.shapes = {
        name: shape
        for name, module in copied.named_modules()
        if isinstance(shape := vars(module).get("normalized_shape"), tuple)
    }
    try:
        # What the forward draws may decide which modules run.
        with seeded(copied), _listening(tracer, copied):
            outputs = copied(*args, **kwargs)
    except Exception as error:
        raise TraceError(f"the model's forward fails on `example_inputs`: {type(error).__name__}: {error}") from error
    tracer.note_use("output", _tensors_in(outputs))
    for tensor in _tensors_in(outputs):
        if (value := tracer.activation(tensor)) is not None:
            constraints.freeze(value.nodes, "it is an output of the network")
        tracer.keep_averaged([tensor])
    parameters = copied.named_parameters(remove_duplicate=False)
    used = {name.rpartition(".")[0] for name, tensor in parameters if names[id(tensor)] in tracer.used}
    return tracer.reached | used


def _is_count(value: Any) -> bool:
    """Whether the value of an attribute may be a number of channels."""
    return isinstance(value, int) and not isinstance(value, bool) and plain(value) > 0


def _is_configuration(value: Any) -> bool:
    """Whether an attribute is an object with settings, by the name of its class."""
    named = any(base.__name__.endswith(("Config", "Args", "Namespace")) for base in type(value).__mro__)
    return named and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | Tensor)


def _is_native(module: nn.Module) -> bool:
    """Whether the module is one of PyTorch's own layers, or a subclass with the same forward."""
    base = next((layer for layer in _LAYERS if isinstance(module, layer)), None)
    unchanged = base is not None and type(module).forward is base.forward
    return unchanged or getattr(type(module), "same_as_base", False) or isinstance(module, nn.SyncBatchNorm)


def _is_cache(output: Any) -> bool:
    """Whether an output is a cache, as of keys and values: state for the next call of the same network."""
    return any(base.__name__.endswith("Cache") for base in type(output).__mro__)


def _tensors_in(outputs: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors of an output, apart from caches: only the network itself reads those, at whatever width it has."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif depth > 0:
        if isinstance(outputs, dict):
            inner = list(outputs.values())
        elif isinstance(outputs, list | tuple | set):
            inner = list(outputs)
        elif is_dataclass(outputs):
            inner = [getattr(outputs, f.name) for f in fields(outputs)]
        elif _is_cache(outputs):
            inner = []
        else:
            inner = list(getattr(outputs, "__dict__", {}).values())
        for item in inner:
            yield from _tensors_in(item, depth - 1)


@contextmanager
def _listening(tracer: Tracer, model: nn.Module) -> Iterator[None]:
    """Follow what `model` computes within this context."""

    flow = tracer.flow
    entered: list[tuple[Seen | None, int]] = []

    def enter(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        tracer.modules.append(name)
        tracer.reached.add(name)
        entered.append((tracer.seen(args[0]) if args else None, len(flow.operations)))

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name, (before, begin) = tracer.modules.pop(), entered.pop()
        first, others = (result[0], result[1:]) if isinstance(result, tuple) and result else (result, ())
        if not all(isinstance(other, Tensor | None) for other in others):
            first = None
        serials = tuple(seen.serial for seen in map(tracer.seen, others) if seen is not None)
        number, alone = len(result) if isinstance(result, tuple) else 0, len(args) == 1 and not kwargs
        after, end = tracer.seen(first), len(flow.operations)
        flow.calls.append(ModuleCall(name, alone, number, before, after, serials, begin, end))

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name)))
        handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.inference_mode(), _Functions(tracer), _Operations(tracer):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for handle in handles:
            handle.remove()


class _Functions(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPES:
            self.tracer.note_use("size", args[:1])
        if func == Tensor.shape.__get__ or func == Tensor.size:  # type: ignore[attr-defined]
            return self._shape(func, args, kwargs)
        outer, self.tracer.written = self.tracer.written, (func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in OVER_CHANNELS:
            self.tracer.over_channels[self.tracer.modules[-1]] += 1
        if name in _ESCAPES:
            self.tracer.keep_all(args[:1], f"it leaves PyTorch ({name})")
            self.tracer.note_use(name, args[:1])
        for size in self._used_as_numbers(name, args, kwargs):
            self.tracer.size_used(size.expression)
        try:
            return func(*args, **kwargs)
        finally:
            self.tracer.written = outer

    def _used_as_numbers(self, name: str, args: Any, kwargs: Any) -> list[Size]:
        """Sizes that must not change: in `x * c`, and those with which a constant is reshaped."""
        leaves = tree_flatten((args, kwargs))[0]
        for piece in [leaf for leaf in leaves if isinstance(leaf, slice)]:
            leaves += [piece.start, piece.stop]
        sizes = [leaf for leaf in leaves if isinstance(leaf, Size)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] if sizes else []
        constant = bool(tensors) and all(self.tracer.value(tensor) is None for tensor in tensors)
        constant = constant and name not in _CREATING  # `mask.new_zeros(c)` has a rule
        return sizes if constant or name.strip("_") in _ARITHMETIC else []

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        value = self.tracer.activation(tensor)
        if value is None:
            return func(*args, **kwargs)
        sizes: list[int] = list(tensor.shape)
        for dim in value.varies():
            rows = value.nodes.movedim(dim, 0).reshape(sizes[dim], -1)
            sizes[dim] = Size(sizes[dim], Dimension(rows), self.tracer.size_used)
        if func == Tensor.size and (len(args) > 1 or kwargs):
            return sizes[args[1] if len(args) > 1 else kwargs["dim"]]
        return Shape(sizes)


_SHAPES = frozenset(
    (
        *(Tensor.shape.__get__, Tensor.ndim.__get__),  # type: ignore[attr-defined]
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
    )
)
_ARITHMETIC = frozenset(
    "add radd iadd sub rsub isub mul rmul imul multiply div rdiv divide truediv rtruediv itruediv true_divide pow "
    "rpow".split()
)


_ESCAPES = frozenset({"numpy", "__array__", "tolist", "__dlpack__", "data_ptr"})
_COSTLY = frozenset(
    "matmul einsum linear mm addmm bmm baddbmm conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention tensordot inner mv dot mkldnn_rnn_layer _cudnn_rnn".split()
)  # counted even where nothing in them can shrink


_CREATING = frozenset("zeros ones full empty rand randn new_zeros new_ones new_full new_empty".split())
_MOVES = frozenset(
    "view reshape _unsafe_view unflatten expand permute transpose t chunk split split_with_sizes slice select unbind "
    "squeeze unsqueeze contiguous clone alias _to_copy to _weight_norm_interface".split()
)  # after which a parameter is still a weight with the same entries
_TAKES_BIAS = frozenset("linear addmm conv1d conv2d conv3d".split())
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping would import the compiler: a second or two

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tracer = kwargs or {}, self.tracer
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        count = len(tracer.flow.operations)
        result = self._followed(func, args, kwargs, tensors)
        if len(tracer.flow.operations) == count:  # otherwise those that it is decomposed into are recorded
            tracer.note_operation(func, (args, kwargs), tensors, result)
        return result

    def _followed(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """The result of an operation, of which the tracer has been told."""
        tracer = self.tracer
        tracer.used.update(tracer.names[id(tensor)] for tensor in tensors if id(tensor) in tracer.names)
        name = func._schema.name.removeprefix("aten::")
        if tracer.averages:
            tracer.keep_averaged(tensors)
        if name not in _TAKES_BIAS:
            tracer.pin_pieces(tensors)
        created = name in _CREATING and any(isinstance(leaf, Size | Shape) for leaf in tree_flatten(tracer.written)[0])
        if name not in _COSTLY and not created and all(tracer.value(tensor) is None for tensor in tensors):
            return func(*args, **kwargs)
        if name in _RECURRENT:  # PyTorch's module checks sizes against its attributes
            tracer.keep_all(tensors, f"it enters a recurrent layer ({name})")
        rule = tracer.rule_for(func)
        if rule is None and func._can_decompose():
            tracer.decomposing += 1
            try:
                with self:
                    return func.decompose(*args, **kwargs)
            finally:
                tracer.decomposing -= 1
        arguments = bind(func, args, kwargs)
        result = func(*args, **kwargs)
        if rule is None:
            tracer.keep_all(tensors, f"operation {name} has no rule (slimstart.register_rule adds one)")
        else:
            rule(tracer, Call(name, arguments, result, tracer.written, func))
        if name not in _MOVES:
            tracer.note_uses(tensors)
        tracer.weight = None
        return result

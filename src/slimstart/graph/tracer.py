"""Run a forward and follow its channels.

Two modes of PyTorch do the listening. A dispatch mode sees every operation with its tensors, under inference mode, so
that composite operations (`linear`, `chunk`, `scaled_dot_product_attention`) arrive whole; one that has no rule is
decomposed into those that have. A function mode above it hands out `Size` objects for `tensor.shape` and remembers the
sizes with which a function was called, which the dispatcher would turn into plain integers.

Values are real, so control flow that depends on data takes the branch it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from slimstart.graph.constraints import Ledger
from slimstart.graph.sizes import Dimension, Expression, Shape, Size
from slimstart.graph.values import Call, Value, bind, compress


@dataclass
class Tracer:
    """State of one run: the values of live tensors and the stack of modules; what is learned goes to the ledger.

    Attributes:
        ledger: where the notes go.
        names: names of the parameters and buffers, by identity.
        full_sizes: their shapes, by name.
        native: layers of PyTorch's own, by name.
        portable: those of them that can be given ports.
        rule_for: finds the rule of an operation.
        count_costs: whether this run's operations enter the cost table.
    """

    ledger: Ledger
    names: dict[int, str]
    full_sizes: dict[str, torch.Size]
    native: dict[str, nn.Module]
    portable: set[str]
    rule_for: Callable[[Any], Callable[[Tracer, Call], None] | None]
    count_costs: bool
    modules: list[str] = field(default_factory=lambda: [""])
    reached: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)  # parameters and buffers that entered an operation
    values: Any = field(default_factory=WeakTensorKeyDictionary)
    written: tuple[Any, ...] = ()
    decomposing: int = 0

    # --- values ----------------------------------------------------------------------------------------------------

    def value(self, tensor: Any) -> Value | None:
        """What is known of a tensor; None for constants."""
        if not isinstance(tensor, Tensor):
            return None
        known: Value | None = self.values.get(tensor)
        if known is None and id(tensor) in self.names:
            dims = range(tensor.dim())
            fields = [torch.arange(tensor.shape[d]).view([-1 if e == d else 1 for e in dims]) for d in dims]
            return Value(tuple(fields), tensor.shape, self.names[id(tensor)])
        if known is not None and known.shape != tensor.shape:  # resized in place: nothing is known any more
            self.ledger.keep_whole(known.nodes, "it is resized in place") if known.source is None else None
            return None
        return known

    def activation(self, tensor: Any) -> Value | None:
        """The value of an activation that is followed; None for constants and parameters."""
        value = self.value(tensor)
        return value if value is not None and value.source is None else None

    def parameter(self, tensor: Any) -> Value | None:
        """The value of a parameter or buffer, possibly reshaped or cut; None otherwise."""
        value = self.value(tensor)
        return value if value is not None and value.source is not None else None

    def set(self, tensor: Tensor, nodes: Tensor) -> None:
        """Say that a tensor carries these nodes (of its number of dimensions, length one where nothing changes)."""
        if nodes.dim() < tensor.dim():
            nodes = nodes.view((1,) * (tensor.dim() - nodes.dim()) + nodes.shape)
        nodes = compress(nodes)
        if nodes.numel() == 1 and int(nodes) == 0:
            self.values.pop(tensor, None)
        else:
            self.values[tensor] = Value((nodes,), tensor.shape)

    def overwrite(self, tensor: Tensor, nodes: Tensor) -> None:
        """`set` for a tensor that was written in place: other tensors that show the same memory lose track."""
        before = self.activation(tensor)
        if before is not None and before.nodes.shape == nodes.shape and bool((before.nodes == nodes).all()):
            return
        memory = tensor.untyped_storage().data_ptr()
        others = [t for t in self.values if t is not tensor and t.untyped_storage().data_ptr() == memory]
        if others:
            self.keep_whole(others, "a view of it is written in place")
            self.ledger.keep_whole(nodes, "it is written into a view of another tensor")
            for other in others:  # who else writes them now is not known: they are read whole
                del self.values[other]
        self.set(tensor, nodes)

    def set_channels(self, tensor: Tensor, dim: int, nodes: Sequence[int]) -> None:
        """Say that a tensor carries these nodes along one dimension."""
        shape = [1] * tensor.dim()
        shape[dim] = len(nodes)
        self.set(tensor, torch.tensor(list(nodes), dtype=torch.int64).view(shape))

    def channels(self, tensor: Tensor, dim: int) -> list[int] | None:
        """Nodes along one dimension; None if they change along another one too."""
        value = self.activation(tensor)
        if value is None:
            return [0] * tensor.shape[dim]
        dim = dim % tensor.dim()
        if any(d != dim for d in value.varies()):
            return None
        nodes: list[int] = value.nodes.reshape(-1).expand(tensor.shape[dim]).tolist()
        return nodes

    def boundary(self, parameter: str | None) -> str | None:
        """The layer being run, if it owns this parameter and can be given ports."""
        owner = self.owner(parameter)
        return owner if owner in self.portable else None

    def owner(self, parameter: str | None) -> str | None:
        """The module being run, if it is a layer of PyTorch's that owns this parameter (or has none at all)."""
        module = self.modules[-1]
        if module not in self.native:
            return None
        home = parameter.rpartition(".")[0] if parameter is not None else module
        tied = parameter is not None and any(
            id(p) in self.names and self.names[id(p)] == parameter
            for p in self.native[module].parameters(recurse=False)
        )
        return module if home == module or tied else None

    def keep_whole(self, tensors: Sequence[Any], reason: str) -> None:
        """Whatever these tensors are, they stay as they are."""
        for tensor in tensors:
            value = self.value(tensor)
            if value is not None and value.source is None:
                self.ledger.keep_whole(value.nodes, reason)
            elif value is not None:
                self.pin(value, reason)

    def pin(self, value: Value, reason: str) -> None:
        """A parameter that is used in a way that cannot be followed is never cut, whoever else uses it."""
        assert value.source is not None
        self.ledger.unfollowed.setdefault(value.source, reason)
        for dim, coordinates in enumerate(value.fields):
            indices = torch.unique(coordinates).tolist()
            self.ledger.follow(value.source, dim, indices, [0] * len(indices))

    def size_used_as_number(self, expression: Expression) -> None:
        self.ledger.used_as_number(expression, self.modules[-1])

    # --- running ---------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Follow whatever `model` computes."""

        def enter(name: str, *_: Any) -> None:
            self.modules.append(name)
            self.reached.add(name)

        def leave(*_: Any) -> None:
            self.modules.pop()

        handles: list[Any] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.inference_mode(), _Functions(self), _Operations(self):
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
        if func == Tensor.shape.__get__ or func == Tensor.size:  # type: ignore[attr-defined]
            return self._shape(func, args, kwargs)
        outer, self.tracer.written = self.tracer.written, (func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _ESCAPES:
            self.tracer.keep_whole(args[:1], f"it leaves PyTorch ({name})")
        for size in self._used_as_numbers(name, args, kwargs):
            self.tracer.size_used_as_number(size.expression)
        try:
            return func(*args, **kwargs)
        finally:
            self.tracer.written = outer

    def _used_as_numbers(self, name: str, args: Any, kwargs: Any) -> list[Size]:
        """Sizes that must not change: in `x * c`, and those by which a tensor is reshaped that has no channels."""
        leaves = tree_flatten((args, kwargs))[0]
        for piece in [leaf for leaf in leaves if isinstance(leaf, slice)]:
            leaves += [piece.start, piece.stop]
        sizes = [leaf for leaf in leaves if isinstance(leaf, Size)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] if sizes else []
        constant = bool(tensors) and all(self.tracer.value(tensor) is None for tensor in tensors)
        return sizes if constant or name.strip("_") in _ARITHMETIC else []

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        value = self.tracer.activation(tensor)
        if value is None:
            return func(*args, **kwargs)
        sizes: list[int] = list(tensor.shape)
        for dim in value.varies():
            rows = value.nodes.movedim(dim, 0).reshape(sizes[dim], -1)
            sizes[dim] = Size(sizes[dim], Dimension(rows), self.tracer.size_used_as_number)
        if func == Tensor.size and (len(args) > 1 or kwargs):
            return sizes[args[1] if len(args) > 1 else kwargs["dim"]]
        return Shape(sizes)


_ARITHMETIC = frozenset(
    "add radd iadd sub rsub isub mul rmul imul multiply div rdiv divide truediv rtruediv itruediv true_divide pow "
    "rpow".split()
)


_ESCAPES = frozenset({"numpy", "__array__", "tolist", "__dlpack__", "data_ptr"})
_COSTLY = frozenset(
    "matmul einsum linear mm addmm bmm baddbmm conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention tensordot inner mv dot".split()
)  # counted even where nothing in them can shrink


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
        tracer.used.update(tracer.names[id(tensor)] for tensor in tensors if id(tensor) in tracer.names)
        name = func._schema.name.removeprefix("aten::")
        if name not in _COSTLY and all(tracer.value(tensor) is None for tensor in tensors):
            return func(*args, **kwargs)
        if name in _RECURRENT:  # PyTorch's module compares sizes with attributes of its own
            tracer.keep_whole(tensors, f"it enters a recurrent layer ({name})")
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
            tracer.keep_whole(tensors, f"operation {name} has no rule")
        else:
            rule(tracer, Call(name, arguments, result, tracer.written, func))
        return result

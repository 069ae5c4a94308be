"""Facts about the tensors of a run, and about one operation: the state that rules read and write.

Every activation carries the ids of its channels, in an integer tensor that is moved by the same operations (`Value`).
Values of tensors are real, so control flow that depends on data takes the branch it takes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from slimstart.graph.constraints import CallKey, Constraints, Count, ParameterIndices, Presence
from slimstart.graph.flow import Flow, Operation, Seen
from slimstart.graph.sizes import Attribute, Dimension, Expression, Size, plain

OVER_CHANNELS = frozenset(
    "layer_norm rms_norm group_norm batch_norm mean var std var_mean std_mean sum norm linalg_norm linalg_vector_norm "
    "scaled_dot_product_attention _weight_norm".split()
)
"""Functions whose result depends on the number of channels they run over, which may be those that exist.

Attention has a scale that depends on it, and weight norm divides every filter by its own length.
"""


@dataclass(frozen=True, eq=False)
class Value:
    """Facts about a tensor: integer tensors of its shape, which are reshaped and permuted like it.

    An activation has one field, its node ids. A parameter or buffer has `source`, its name, and one field per dimension
    of the original: the index from which each entry comes. Fields have length one along dimensions where they do not
    change.
    """

    fields: tuple[Tensor, ...]
    shape: torch.Size
    source: str | None = None

    @property
    def nodes(self) -> Tensor:
        assert self.source is None
        return self.fields[0]

    def varies(self) -> list[int]:
        """Dimensions along which some field changes."""
        return [dim for dim in range(len(self.shape)) if any(f.shape[dim] > 1 for f in self.fields)]

    def moved(self, operation: Callable[[Tensor], Tensor]) -> Value:
        """The value after an operation that only moves entries."""
        fields = tuple(operation(f.expand(self.shape)) for f in self.fields)
        return Value(tuple(compress(f) for f in fields), fields[0].shape if fields else torch.Size(), self.source)


def compress(field: Tensor) -> Tensor:
    """The same field, reduced to length one along every dimension where it does not change."""
    for dim, size in enumerate(field.shape):
        if size > 1:
            first = field.narrow(dim, 0, 1)
            if field.stride(dim) == 0 or bool((field == first).all()):
                field = first
    return field


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of a tensor, also while the user's forward would be given sizes that report what is done with them."""
    with torch._C.DisableTorchFunction():
        return tensor.shape


_SCALING = frozenset(
    {"mul", "dropout", "native_dropout", "to", "_to_copy", "clone", "contiguous"}
)  # div, too, for what is divided


def _keeps_zero(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a pointwise function of one tensor is zero at zero; found by running it."""
    args, kwargs = tree_map_only(Tensor, lambda one: one.new_zeros(()), (args, kwargs))
    try:
        outcome = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return isinstance(outcome, Tensor) and bool((outcome == 0).all())


def _keeps_shape(tensors: Sequence[Tensor], fixed: Sequence[bool], results: Sequence[Tensor]) -> bool:
    """Whether the first result has the shape of the tensor that is not fixed."""
    return bool(results) and shape_of(results[0]) == shape_of(tensors[fixed.index(False)])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _size(tensor: Tensor) -> int:
    """The number of entries in the whole memory of a tensor."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _part(memory: Tensor, tensor: Tensor) -> Tensor:
    """The part of a field of all entries of a memory that belongs to a tensor there."""
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class Call:
    """One operation: its arguments by the names in its schema, its result, and the call as the user wrote it."""

    name: str
    arguments: dict[str, Any]
    result: Any
    written: tuple[Any, ...]
    func: Any

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def subject(self) -> Any:
        """The tensor to which the operation is applied; schemas name it `self` or `input`."""
        return self.arguments["self"] if "self" in self.arguments else self.arguments["input"]

    @property
    def results(self) -> list[Tensor]:
        """All tensors of the result."""
        several = self.result if isinstance(self.result, tuple | list) else (self.result,)
        return [result for result in several if isinstance(result, Tensor)]


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in func._schema.arguments), args, strict=False))
    bound.update(kwargs)
    return bound


@dataclass
class Tracer:
    """State of one run: facts about its tensors, and the module that runs. Rules read it and add constraints.

    Attributes:
        constraints: constraints of the trace.
        names: names of the parameters and buffers, by identity.
        full_sizes: their shapes, by name.
        native: layers of PyTorch's own, by name.
        portable: names of the native layers that can be given ports.
        rule_for: finds the rule of an operation.
        training: the mode of this run; operations enter the cost table in evaluation mode only.
        flow: the operations and module calls of this run.
        unsaved: names of buffers that state dicts leave out.
        shapes: the attributes `normalized_shape` of modules, by name of the module.
        modules: names of the modules that run now, the innermost last.
        reached: names of all modules that have run.
        used: names of parameters and buffers that have entered an operation.
        values: known values of each tensor; constants are absent.
        pieces: for a vector that is concatenated from parameters, the value and length of each.
        weight: the tensor that the present operation reads as the weight of a layer, if there is one.
        averages: for the weights that `nn.MultiheadAttention` returns, the value of its queries.
        memories: by address, memory into a part of which channels were written; see `write`.
        written: the function that the user called, which the present operation belongs to, with its arguments.
        over_channels: number of calls so far, by module, of functions in `OVER_CHANNELS`.
        decomposing: how many operations are being decomposed, one within the other.
    """

    constraints: Constraints
    names: dict[int, str]
    full_sizes: dict[str, torch.Size]
    native: dict[str, nn.Module]
    portable: set[str]
    rule_for: Callable[[Any], Callable[[Tracer, Call], None] | None]
    training: bool
    flow: Flow = field(default_factory=Flow)
    unsaved: frozenset[str] = frozenset()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=lambda: [""])
    reached: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    values: Any = field(default_factory=WeakTensorKeyDictionary)
    pieces: Any = field(default_factory=WeakTensorKeyDictionary)
    weight: Tensor | None = None
    averages: Any = field(default_factory=WeakTensorKeyDictionary)
    _serials: Any = field(default_factory=WeakTensorKeyDictionary)
    _count: Iterator[int] = field(default_factory=itertools.count)
    memories: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    written: tuple[Any, ...] = ()
    over_channels: Counter[str] = field(default_factory=Counter)
    decomposing: int = 0
    _compared: set[tuple[Any, ...]] = field(default_factory=set)  # sizes, see `size_used`

    @property
    def count_costs(self) -> bool:
        return not self.training

    def value(self, tensor: Any) -> Value | None:
        """Facts about a tensor; None for constants."""
        if not isinstance(tensor, Tensor):
            return None
        known: Value | None = self.values.get(tensor)
        if known is None and self.memories and (memory := self.memories.get(_address(tensor))) is not None:
            if memory[0].element_size() == tensor.element_size():
                self.set(tensor, _part(memory[1], tensor).to(torch.int64))
            else:
                self.constraints.keep_all(memory[1], "its memory is read as another type")
            return self.values.get(tensor)  # type: ignore[no-any-return]
        if known is None and id(tensor) in self.names:
            dims = range(tensor.dim())
            fields = [torch.arange(tensor.shape[d]).view([-1 if e == d else 1 for e in dims]) for d in dims]
            return Value(tuple(fields), shape_of(tensor), self.names[id(tensor)])
        if known is not None and known.shape != shape_of(tensor):  # resized in place
            self.constraints.keep_all(known.nodes, "it is resized in place") if known.source is None else None
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

    def is_vector(self, tensor: Tensor) -> bool:
        """Whether a tensor is one parameter with one dimension, or several that are concatenated."""
        return tensor.dim() == 1 and (self.parameter(tensor) is not None or tensor in self.pieces)

    def follow_vector(self, tensor: Tensor, presences: Sequence[Presence]) -> None:
        """Let a vector, for which `is_vector` is true, shrink with the channels to which its entries belong."""
        value = self.parameter(tensor)
        pieces = self.pieces[tensor] if value is None else [(value, len(presences))]
        start = 0
        for piece, length in pieces:
            assert piece.source is not None
            indices = piece.fields[0].reshape(-1).expand(length).tolist()
            self.constraints.follow(piece.source, 0, indices, presences[start : start + length])
            start += length

    def pin_pieces(self, tensors: Sequence[Tensor]) -> None:
        """Keep all entries of concatenated vectors that are used in another way than as a bias."""
        for tensor in tensors:
            for piece, _ in self.pieces.get(tensor, ()):
                self.pin(piece, "it is concatenated")

    def indices_along(self, value: Value, dim: int) -> ParameterIndices | None:
        """The indices of a parameter that lie along `dim` of this view of it; None unless they are of one dimension."""
        running = [d for d, field in enumerate(value.fields) if field.shape[dim] > 1]
        if value.source is None or len(running) != 1 or value.fields[running[0]].numel() != value.shape[dim]:
            return None
        return ParameterIndices(value.source, running[0], tuple(value.fields[running[0]].reshape(-1).tolist()))

    def note_uses(self, tensors: Iterable[Tensor]) -> None:
        """Note the matrices that an operation uses in another way than as the weight of a layer."""
        for tensor in tensors:
            value = self.parameter(tensor) if tensor is not self.weight else None
            if value is not None and value.source is not None:
                self.constraints.used_otherwise.add(value.source)

    def keep_averaged(self, tensors: Iterable[Any]) -> None:
        """Keep all heads whose weights are used: they are an average, and depend on the number of heads."""
        for tensor in tensors:
            value = self.averages.get(tensor) if isinstance(tensor, Tensor) else None
            if value is not None:
                self.constraints.freeze(value.nodes, "the weights of its attention are used")

    def seen(self, tensor: Any) -> Seen | None:
        """A tensor as it is now; None for anything else."""
        if not isinstance(tensor, Tensor):
            return None
        value = self.activation(tensor)
        return Seen(self._serial(tensor), shape_of(tensor), None if value is None else value.nodes)

    def _serial(self, tensor: Tensor) -> int:
        serial: int | None = self._serials.get(tensor)
        if serial is None:
            serial = self._serials[tensor] = next(self._count)
        return serial

    def note_use(self, name: str, found: Iterable[Any]) -> None:
        """Record a use of tensors that is no operation; anything else is ignored."""
        serials = tuple(self._serial(one) for one in found if isinstance(one, Tensor))
        self.flow.operations.append(Operation(name, serials))

    def note_operation(self, func: Any, arguments: Any, tensors: Sequence[Tensor], result: Any) -> None:
        """Record an operation.

        Args:
            arguments: its arguments, those by position and those by name.
            tensors: the tensors among them.
        """
        name = func._schema.name.removeprefix("aten::")
        reads = tuple(map(self._serial, tensors))
        in_place = func._schema.is_mutable
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        parameters = [self.parameter(tensor) for tensor in tensors]
        fixed = [value is not None for value in parameters]
        streams: tuple[int, ...] = ()
        if name in ("add", "add_") and len(tensors) == 2 and not any(fixed):
            (first, second), numbers = (
                tensors,
                [leaf for leaf in tree_flatten(arguments)[0] if not isinstance(leaf, Tensor)],
            )
            if shape_of(first) == shape_of(second) == shape_of(result) and all(number == 1 for number in numbers):
                streams = reads[:1] if in_place else reads
        others = [serial for serial, one in zip(reads, fixed, strict=True) if not one]
        pointwise = torch.Tag.pointwise in func.tags
        unary = len(tensors) == 1 and not in_place and (pointwise or name == "dropout")
        scales = name in _SCALING or (name == "div" and not fixed[0]) or (unary and _keeps_zero(func, *arguments))
        scaled = others[0] if scales and len(others) == 1 and _keeps_shape(tensors, fixed, results) else None
        matrices = [tensor for tensor, one in zip(tensors, fixed, strict=True) if one and tensor.dim() > 1]
        self.flow.operations.append(
            Operation(
                name=name,
                reads=reads,
                addresses=tuple(map(_address, tensors)),
                results=tuple(map(self._serial, results)),
                streams=streams,
                scaled=scaled,
                unary=unary,
                in_place=in_place,
                weighs=bool(matrices) and not pointwise,
                parameters=tuple(value.source for value in parameters if value is not None and value.source),
            )
        )

    def set(self, tensor: Tensor, nodes: Tensor) -> None:
        """Set the nodes of a tensor: a field with its number of dimensions, of length one where nothing changes."""
        if nodes.dim() < tensor.dim():
            nodes = nodes.view((1,) * (tensor.dim() - nodes.dim()) + nodes.shape)
        nodes = compress(nodes)
        if nodes.numel() == 1 and int(nodes) == 0:
            self.values.pop(tensor, None)
        else:
            self.values[tensor] = Value((nodes,), shape_of(tensor))

    def write(self, tensor: Tensor, nodes: Tensor) -> None:
        """Set the nodes of a tensor that was written in place, and of all others that have its memory."""
        before = self.activation(tensor)
        if before is not None and before.nodes.shape == nodes.shape and bool((before.nodes == nodes).all()):
            return
        address = _address(tensor)
        sharing = [t for t in self.values if t.numel() and _address(t) == address]
        views = [t for t in sharing if t is not tensor]
        if address not in self.memories:
            if not views and tensor.is_contiguous() and tensor.numel() == _size(tensor):
                return self.set(tensor, nodes)
            # The tensor is stored, too, so that nothing else can have this address.
            self.memories[address] = tensor, torch.zeros(_size(tensor), dtype=torch.int32)
            for view in views:
                self._remember(view)
        memory = self.memories[address][1]
        nodes = nodes.view((1,) * (tensor.dim() - nodes.dim()) + nodes.shape)
        _part(memory, tensor).copy_(nodes.expand(tensor.shape))
        for other in sharing:  # found again where they are read
            del self.values[other]
        return None

    def _remember(self, view: Tensor) -> None:
        """Note the nodes of a tensor in the memory that it has with others."""
        first, memory = self.memories[_address(view)]
        value = self.values[view]
        if value.source is None and view.element_size() == first.element_size():
            _part(memory, view).copy_(value.nodes.expand(view.shape))
        else:
            self.keep_all([view], "a view of it is written in place")

    def set_channels(self, tensor: Tensor, dim: int, nodes: Sequence[int]) -> None:
        """Set the nodes of a tensor along one dimension."""
        shape = [1] * tensor.dim()
        shape[dim] = len(nodes)
        self.set(tensor, torch.tensor(list(nodes), dtype=torch.int64).view(shape))

    def channels(self, tensor: Tensor, dim: int) -> list[int] | None:
        """The nodes along one dimension; None if they change along another one too."""
        value = self.activation(tensor)
        if value is None:
            return [0] * tensor.shape[dim]
        dim = dim % tensor.dim()
        if any(d != dim for d in value.varies()):
            return None
        nodes: list[int] = value.nodes.reshape(-1).expand(tensor.shape[dim]).tolist()
        return nodes

    def boundary(self, parameter: str | None) -> str | None:
        """The name of the layer that runs, if it owns this parameter and can be given ports."""
        owner = self.owner(parameter)
        return owner if owner in self.portable else None

    def owner(self, parameter: str | None) -> str | None:
        """The name of the layer that runs, if it is PyTorch's own and owns this parameter (any, for None)."""
        module = self.modules[-1]
        if module not in self.native:
            return None
        home = parameter.rpartition(".")[0] if parameter is not None else module
        tied = parameter is not None and any(
            id(p) in self.names and self.names[id(p)] == parameter
            for p in self.native[module].parameters(recurse=False)
        )
        return module if home == module or tied else None

    @property
    def call_key(self) -> CallKey:
        """The present call of a function in `OVER_CHANNELS`, which `narrow.kept_norms` numbers alike."""
        return self.training, self.modules[-1], self.over_channels[self.modules[-1]] - 1

    def shrinks_over(self, tensor: Tensor, dim: int) -> tuple[Presence, ...] | None:
        """Let the present operation run over the channels that exist; None where it has to run over all of them.

        It must be the call of a function in `OVER_CHANNELS`, which `narrow.kept_norms` knows, too.

        Args:
            tensor: its input.
            dim: the channel dimension.
        """
        value, name = self.activation(tensor), getattr(self.written[0], "__name__", "") if self.written else ""
        if self.constraints.norms == "keep" or name not in OVER_CHANNELS or value is None or value.varies() != [dim]:
            return None
        if self.call_key in self.constraints.whole_norms:
            return None
        return self.constraints.normalise(self.call_key, dim - tensor.dim(), value.nodes.reshape(-1).tolist())

    def parameter_writes(self, parameter: Value, dim: int, dims: int) -> Tensor | None:
        """The nodes of a parameter that is added to channels along `dim`, or concatenated; None if it cannot shrink.

        They are kept, unless the channels are normalised over and so have one mask.

        Args:
            dims: number of dimensions of what it is added to.
        """
        source = parameter.source
        fields = [f.view((1,) * (dims - f.dim()) + f.shape) for f in parameter.fields]
        running = [d for d, f in enumerate(fields) if f.shape[dim] > 1]
        if self.constraints.norms == "keep" or source is None or source in self.unsaved or len(running) != 1:
            return None
        found = fields[running[0]]
        if found.numel() != found.shape[dim]:
            return None
        size, indices = self.full_sizes[source][running[0]], found.reshape(-1).tolist()
        nodes = self.constraints.write(source, running[0], size, indices, source, exact=False)
        for node in nodes:
            self.constraints.added_parameters.setdefault(node, "it is added to channels that others write too")
        return torch.tensor(nodes, dtype=torch.int64).view(found.shape)

    def begin_stream(self, tensor: Tensor, dim: int) -> Value | None:
        """Follow a parameter as channels along `dim`: a stream begins with it (learned queries); None if it is kept."""
        value = self.parameter(tensor)
        nodes = None if value is None else self.parameter_writes(value, dim % tensor.dim(), tensor.dim())
        if nodes is None:
            return None
        self.set(tensor, nodes)
        return self.activation(tensor)

    def keep_all(self, tensors: Sequence[Any], reason: str) -> None:
        """Keep all channels of these tensors, activations or parameters, for a reason that the user is told."""
        for tensor in tensors:
            value = self.value(tensor)
            if value is not None and value.source is None:
                self.constraints.keep_all(value.nodes, reason)
            elif value is not None:
                self.pin(value, reason)
            elif isinstance(tensor, Tensor):
                self.pin_pieces([tensor])

    def pin(self, value: Value, reason: str) -> None:
        """Keep all indices of a parameter, because one of its uses cannot be followed."""
        assert value.source is not None
        self.constraints.unfollowed.setdefault(value.source, reason)
        for dim, coordinates in enumerate(value.fields):
            indices = torch.unique(coordinates).tolist()
            self.constraints.follow(value.source, dim, indices, [0] * len(indices))

    def size_of_attribute(self, module: str, name: str, value: int) -> Size:
        """An integer attribute of one of the user's modules, as a size that remembers this."""
        return Size(plain(value), Attribute(module, name, plain(value)), self.size_used)

    def size_used(self, expression: Expression, equal_to: Expression | int | None = None) -> None:
        """A size is used as a number, or compared with another one that is equal."""
        if equal_to is None:
            return self.constraints.used_as_number(expression, self.modules[-1])
        first, second = (equal_to, expression) if isinstance(equal_to, Dimension) else (expression, equal_to)
        if isinstance(first, Attribute) and isinstance(second, int):
            return self.constraints.used_as_number(first, self.modules[-1])
        # Tensors of equal size are tied where they meet; of remainders (`c % 8 == 0`) only the zero must remain.
        if isinstance(first, Dimension) and not isinstance(second, Dimension):
            rows = tuple(map(tuple, first.nodes.tolist()))
            if (rows, second) not in self._compared:
                self._compared.add((rows, second))
                where = f"its size is compared in {self.modules[-1] or 'the forward'}"
                self.constraints.counts.append(Count(rows, second, where))
        return None

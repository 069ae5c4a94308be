"""Operations that move entries: the same operation is applied to the ids of the channels.

A size that the user's forward computes (`view(b, 4, 16)`) or a position (`x[:, :8]`) may be wrong when channels are
removed. Both are recorded as constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from slimstart.graph.constraints import CONSTANT, ZERO, Count, Layout, when_carried
from slimstart.graph.rules.register import register_rule
from slimstart.graph.sizes import Attribute, Dimension, Expression, Shape, Size, expression_of, leaves, plain
from slimstart.graph.tracer import Call, Tracer, Value, compress


def _written_sizes(call: Call) -> list[Any]:
    """All integers of the call as the user wrote it, in order."""
    if not call.written:
        return []
    _, args, kwargs = call.written
    leaves: list[Any] = []
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, slice):
            leaves += [leaf.start, leaf.stop]
        else:
            leaves += leaf if isinstance(leaf, Shape) else [leaf]
    return [leaf for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)]


def _as_written(call: Call, size: int) -> Expression | int:
    """The expression of an integer argument, found by value among those that the user wrote."""
    return next((expression_of(s) for s in _written_sizes(call) if isinstance(s, Size) and plain(s) == size), size)


def _all_as_written(call: Call, sizes: list[int]) -> list[Expression | int]:
    """The expressions of a list of integers, found as consecutive ones among those that the user wrote."""
    written = _written_sizes(call)
    for start in range(len(written) - len(sizes) + 1):
        row = written[start : start + len(sizes)]
        if list(map(plain, row)) == sizes:
            return list(map(expression_of, row))
    return list(sizes)


@register_rule("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty")
def create(tracer: Tracer, call: Call) -> None:
    """New tensors: a dimension whose size is that of another tensor, or an attribute, shrinks with that."""
    sizes = _all_as_written(call, list(call.result.shape))
    reason = "a tensor is created with a fixed size"
    if any(sized(tracer, call.result, dim, sizes, reason) for dim in range(len(sizes))):
        return
    for size in sizes:
        if not isinstance(size, int) and any(isinstance(leaf, Dimension) for leaf in leaves(size)):
            tracer.size_used(size)


def sized(tracer: Tracer, tensor: Tensor, dim: int, sizes: Sequence[Expression | int | None], reason: str) -> bool:
    """Let a tensor have the channels that its size along one dimension counts; its other sizes must not change.

    Returns:
        Whether there are such: the size is that of a tensor with channels, or an attribute.
    """
    size, constraints = sizes[dim], tracer.constraints
    if isinstance(size, Attribute) and size.value > 1:
        nodes = constraints.sized(size)
    elif isinstance(size, Dimension):
        nodes = [constraints.pass_on(node, zero_preserving=False) for node in size.nodes[:, 0].tolist()]
    else:
        return False
    tracer.set_channels(tensor, dim, nodes)
    value = tracer.activation(tensor)
    if value is None or not value.varies():
        return False
    if isinstance(size, Dimension) or sum(isinstance(other, Expression) for other in sizes) > 1:
        where = f"{reason} in {tracer.modules[-1] or 'the forward'}"
        constraints.layouts.append(_layout(value.nodes, list(sizes), where))
    return True


def _tuples(rows: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rows.tolist()))


def _move(tracer: Tracer, call: Call, argument: str = "self") -> Value | None:
    """Apply the operation to the fields of its one input and set the result."""
    value = tracer.value(call[argument])
    if value is None:
        return None
    others = {k: tree_map(_on_host, v) for k, v in call.arguments.items() if k != argument}
    moved = value.moved(lambda f: call.func(f, **others))
    tracer.values[call.result] = moved
    return moved


def _on_host(leaf: Any) -> Any:
    """Fields are on the CPU, whatever the device of the network."""
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


@register_rule("permute", "transpose", "t", "numpy_T", "mT", "matrix_H", "swapaxes", "movedim", "moveaxis", "flip")
@register_rule("squeeze", "unsqueeze", "flatten", "repeat", "tile", "repeat_interleave")
@register_rule("diagonal", "atleast_1d", "atleast_2d", "atleast_3d", "ravel", "swapdims")
def move(tracer: Tracer, call: Call) -> None:
    """Operations without sizes: permutations, flattening, repetition."""
    moved = _move(tracer, call)
    if moved is not None and moved.source is None and len(moved.varies()) > 1:
        tracer.constraints.layouts.append(_layout(moved.nodes, [None] * len(moved.shape), "it is reshaped"))


def _layout(nodes: Tensor, sizes: list[Expression | int | None], reason: str, rigid: tuple[int, ...] = ()) -> Layout:
    return Layout(nodes, tuple(sizes), frozenset(rigid), reason)


@register_rule("view", "reshape", "_unsafe_view", "unflatten", "expand", "broadcast_to", "_reshape_alias", "view_copy")
def reshape(tracer: Tracer, call: Call) -> None:
    """Operations with sizes, some of which may have to shrink with the channels."""
    if "dtype" in call.arguments and "size" not in call.arguments:  # view(dtype)
        return tracer.keep_all([call["self"]], "its memory is read as another type")
    value = tracer.value(call["self"])
    assert value is not None
    expanding = call.name in ("expand", "broadcast_to")  # fields are not contiguous: a view of them would be refused
    moved = value.moved(lambda f: (f.expand if expanding else f.reshape)(call.result.shape))
    tracer.values[call.result] = moved
    key = {"unflatten": "sizes", "reshape": "shape"}.get(call.name, "size")
    asked = list(call[key])
    if not tracer.decomposing:
        written = _written_sizes(call)
        if call.name == "unflatten":
            written = written[-len(asked) :]
        if len(written) == len(asked) and all(a == plain(w) for a, w in zip(asked, written, strict=True)):
            asked = written
    sizes: list[Expression | int | None] = [None if a == -1 or tracer.decomposing else expression_of(a) for a in asked]
    if call.name == "unflatten":
        dim = call["dim"] % call["self"].dim()
        sizes = [None] * dim + sizes + [None] * (len(moved.shape) - dim - len(sizes))
    if moved.source is not None:
        return _parameter_sizes(tracer, moved, sizes)
    stretched = [d for d in range(len(sizes)) if expanding and isinstance(sizes[d], Dimension) and _is_single(call, d)]
    if len(stretched) == 1 and sized(tracer, call.result, stretched[0], sizes, "it is expanded to a fixed size"):
        return tracer.keep_all([call["self"]], "it is combined with every channel of another tensor")
    advice = "write -1 for the size that shrinks, or take it from the `shape` of what is reshaped"
    reason = f"it is reshaped to fixed sizes in {tracer.modules[-1] or 'the forward'} ({advice})"
    tracer.constraints.layouts.append(_layout(moved.nodes, sizes, reason))
    return None


def _is_single(call: Call, dim: int) -> bool:
    """Whether a dimension of the result of `expand` is of length one before, or new."""
    tensor = call["self"]
    dim -= call.result.dim() - tensor.dim()
    return dim < 0 or tensor.shape[dim] == 1


def _parameter_sizes(tracer: Tracer, value: Value, sizes: list[Expression | int | None]) -> None:
    """Let attributes in the sizes of a reshaped parameter count what is left of it."""
    where = f"a parameter is reshaped in {tracer.modules[-1] or 'the forward'}"
    for dim, size in enumerate(sizes):
        if size is not None and not isinstance(size, int) and (found := tracer.indices_along(value, dim)) is not None:
            tracer.constraints.parameter_sizes.append((found, size, where))


def argument_as_written(call: Call, name: str, position: int) -> Expression | int:
    """The expression of an integer argument of the function that the user called."""
    if not call.written:
        return int(call[name])
    _, args, kwargs = call.written
    written = kwargs.get(name, args[position] if len(args) > position else call[name])
    return expression_of(written) if isinstance(written, int) else int(call[name])


@register_rule(
    "chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"
)
def split(tracer: Tracer, call: Call) -> None:
    """Splits: equal pieces shrink together; pieces of given sizes need those sizes to shrink with them."""
    value, dim = tracer.value(call["self"]), call["dim"] % call["self"].dim()
    assert value is not None
    start = 0
    for piece in call.result:
        length = piece.shape[dim]
        tracer.values[piece] = value.moved(partial(Tensor.narrow, dim=dim, start=start, length=length))
        start += length
    if value.source is not None or dim not in value.varies():
        return
    lengths = [piece.shape[dim] for piece in call.result]
    where = f"it is split in {tracer.modules[-1] or 'the forward'}"
    equal = len(set(lengths)) == 1
    if call.name in ("chunk", "unsafe_chunk") and equal:
        size: Expression | int | None = None
    elif call.name in ("split", "unsafe_split") and equal and isinstance(call.arguments.get("split_size"), int):
        size = _as_written(call, call["split_size"])
    else:
        start, listed = 0, "with_sizes" in call.name or isinstance(call.arguments.get("split_size"), list | tuple)
        expressions = _all_as_written(call, lengths) if listed else lengths
        rows = value.nodes.movedim(dim, 0).reshape(value.nodes.shape[dim], -1)
        for length, expression in zip(lengths, expressions, strict=True):
            tracer.constraints.counts.append(Count(_tuples(rows[start : start + length]), expression, where))
            start += length
        return
    pieces = value.nodes.unflatten(dim, (len(lengths), lengths[0]))
    asked: list[Expression | int | None] = [None] * pieces.dim()
    asked[dim], asked[dim + 1] = len(lengths), size
    tracer.constraints.layouts.append(_layout(pieces, asked, where, rigid=(dim,)))


@register_rule("slice", "narrow")
def cut(tracer: Tracer, call: Call) -> None:
    """Slices: their start and end must count the channels before them."""
    value, tensor = tracer.value(call["self"]), call["self"]
    assert value is not None
    _move(tracer, call)
    dim = (call["dim"] or 0) % tensor.dim()
    if value.source is not None or dim not in value.varies():
        return
    size = tensor.shape[dim]
    if call.name == "narrow":
        start, end, step = call["start"], call["start"] + call["length"], 1
    else:
        start, end, step = call["start"] or 0, call["end"] if call["end"] is not None else size, call["step"]
    where = f"part of it is taken in {tracer.modules[-1] or 'the forward'}"
    rows = value.nodes.movedim(dim, 0).reshape(size, -1)
    if step != 1 and len(value.varies()) == 1:
        if size % step or start >= step or end < size:
            return tracer.constraints.keep_all(rows, where)
        for block in rows.view(-1, step).tolist():  # `x[..., ::2]`: whole blocks can go
            tracer.constraints.together.append(tuple(map(when_carried, block)))
        return None
    if step != 1:  # every second feature of each head
        sizes: list[Expression | int | None] = [None] * len(value.shape)
        return tracer.constraints.layouts.append(_layout(value.nodes, sizes, where, rigid=(dim,)))
    for position in (start, end):
        if 0 < position < size:
            expression = _as_written(call, position)
            tracer.constraints.counts.append(Count(_tuples(rows[:position]), expression, where))
        elif position < 0:  # counted from the end: what follows must not shrink
            tracer.constraints.keep_all(rows[position:], where)
    return None


@register_rule("select", "index_select", "index", "gather", "roll", "unfold", "take_along_dim")
def pick(tracer: Tracer, call: Call) -> None:
    """Operations that take fixed positions; no channel can be removed along the dimensions where they do."""
    value, tensor = tracer.value(call["self"]), call["self"]
    if value is None:  # a constant is indexed by an activation
        return tracer.keep_all([t for t in tree_flatten(call.arguments)[0] if isinstance(t, Tensor)], "it is an index")
    if call.name == "index":
        touched = [dim for dim, index in enumerate(call["indices"]) if index is not None]
        touched = list(range(tensor.dim())) if any(
            i is not None and i.dtype == torch.bool for i in call["indices"]) else touched  # fmt: skip
    elif call.name == "roll":
        touched = [d % tensor.dim() for d in call["dims"]] or list(range(tensor.dim()))
    else:
        touched = [call.arguments.get("dim", call.arguments.get("dimension")) % tensor.dim()]
    fixed = [dim for dim in value.varies() if dim in touched] if value.source is None else []
    reason = f"fixed positions of it are taken ({call.name})"
    last = _counted_from_end(call) if fixed == touched and len(value.varies()) > 1 else 0
    # The index tensor of `gather` has a size along every dimension, so no other dimension can shrink.
    if fixed and (len(fixed) == len(value.varies()) or call.name in ("gather", "take_along_dim")):
        tracer.constraints.keep_all(value.nodes, reason)
    elif last:  # (heads + 2, width): heads before them can go
        rows = value.nodes.movedim(fixed[0], 0)[-last:]
        tracer.constraints.keep_all(rows, f"part of it is taken in {tracer.modules[-1] or 'the forward'}")
    elif fixed:  # (3, heads, width): the pieces shrink inside
        sizes: list[Expression | int | None] = [None] * len(value.shape)
        tracer.constraints.layouts.append(_layout(value.nodes, sizes, reason, rigid=tuple(fixed)))
    moved = _move(tracer, call)
    if moved is not None and moved.source is None and len(moved.varies()) > 1:
        tracer.constraints.layouts.append(_layout(moved.nodes, [None] * len(moved.shape), "it is indexed"))
    return None


def _counted_from_end(call: Call) -> int:
    """How many of the last positions a list of negative numbers, as in `x[:, [-2, -1]]`, may take; 0 for others."""
    key = call.written[1][1] if call.name == "index" and call.written and len(call.written[1]) > 1 else ()
    lists = [part for part in key if isinstance(part, list)] if isinstance(key, tuple) else []
    numbers = [number for part in lists for number in part]
    negative = len(lists) == 1 and all(type(number) is int and number < 0 for number in numbers)
    return -min(numbers) if negative and numbers else 0


@register_rule("unbind")
def unbind(tracer: Tracer, call: Call) -> None:
    value, dim = tracer.value(call["self"]), call["dim"] % call["self"].dim()
    assert value is not None
    if value.source is None and dim in value.varies():
        others = [d for d in value.varies() if d != dim]
        if others:  # (3, heads, width): the pieces shrink inside
            sizes: list[Expression | int | None] = [None] * len(value.shape)
            tracer.constraints.layouts.append(_layout(value.nodes, sizes, "it is unbound", rigid=(dim,)))
        else:
            tracer.constraints.keep_all(value.nodes, "it is unbound along its channels")
    for index, piece in enumerate(call.result):
        tracer.values[piece] = value.moved(partial(Tensor.select, dim=dim, index=index))


@register_rule("cat", "concat", "concatenate", "stack", "hstack", "vstack")
def concatenate(tracer: Tracer, call: Call) -> None:
    """Concatenation: along channels the result has those of all pieces; along another dimension they are added."""
    tensors, result = call["tensors"], call.result
    parameters = [tracer.parameter(tensor) for tensor in tensors]
    if result.dim() == 1 and call.name != "stack" and all(value is not None for value in parameters):
        tracer.pieces[result] = list(zip(parameters, [tensor.shape[0] for tensor in tensors], strict=True))
        return
    dim = call.arguments.get("dim", 1 if call.name == "hstack" else 0) % result.dim()
    along = {d for value in map(tracer.activation, tensors) if value is not None for d in value.varies()} - {dim}
    fields = []
    for tensor, parameter in zip(tensors, parameters, strict=True):
        value = tracer.activation(tensor)
        nodes = torch.zeros((1,) * tensor.dim(), dtype=torch.int64) if value is None else value.nodes
        if parameter is not None:
            written = None
            if call.name != "stack" and len(along) == 1:
                written = _joined(tracer, parameter, tensors, next(iter(along)))
            if written is None:
                tracer.pin(parameter, "it is concatenated")
            else:
                nodes = written
        if tensor.dim() == 1 and tensor.numel() == 0:
            continue
        fields.append((nodes.unsqueeze(dim) if call.name == "stack" else nodes, tensor))
    lengths = [1 if call.name == "stack" else tensor.shape[dim] for _, tensor in fields]
    varying = {d for nodes, _ in fields for d in range(nodes.dim()) if nodes.shape[d] > 1}
    if dim in varying or not varying:
        shape = [result.shape[d] if d in varying else 1 for d in range(result.dim())]
        parts = []
        for (nodes, _), length in zip(fields, lengths, strict=True):
            shape[dim] = length
            parts.append(nodes.expand(shape))
        tracer.set(result, torch.cat(parts, dim))
        return
    merged = fields[0][0]
    for nodes, _ in fields[1:]:
        merged = pairwise(merged, nodes, tracer.constraints.added)
    tracer.set(result, merged)


def _joined(tracer: Tracer, parameter: Value, tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """The nodes of a parameter that is concatenated to channels along `dim`, as a class token; None if it is kept."""
    dims = tensors[0].dim()
    met = [value.nodes for value in map(tracer.activation, tensors) if value is not None and dim in value.varies()]
    if len(met) == 1 and tracer.constraints.products.issuperset(met[0].reshape(-1).tolist()):
        fields = [f.view((1,) * (dims - f.dim()) + f.shape) for f in parameter.fields]
        own = [d for d, field in enumerate(fields) if field.shape[dim] > 1]
        if (
            len(own) == 1 and fields[own[0]].shape == met[0].shape
        ):  # a score for each head, which goes with it (gpt-oss)
            indices, nodes = fields[own[0]].reshape(-1).tolist(), met[0].reshape(-1).tolist()
            tracer.constraints.follow(parameter.source or "", own[0], indices, list(map(when_carried, nodes)))
            return met[0]
    return tracer.parameter_writes(parameter, dim, dims)


@register_rule("constant_pad_nd", "pad")
def pad(tracer: Tracer, call: Call) -> None:
    """Padding: in space it belongs to the channel; along channels it adds channels that are always there."""
    tensor, value = call["self"], tracer.value(call["self"])
    if value is None or value.source is not None:
        return tracer.keep_all([tensor], "it is padded")
    widths, varying, nodes = list(call["pad"]), value.varies(), value.nodes
    constant = call.name == "constant_pad_nd" or call.arguments.get("mode") == "constant"
    filler = ZERO if constant and not call.arguments.get("value") else CONSTANT
    for index, dim in enumerate(range(tensor.dim() - 1, tensor.dim() - 1 - len(widths) // 2, -1)):
        before, after = widths[2 * index : 2 * index + 2]
        if dim in varying and (before or after):
            tracer.constraints.keep_all(nodes, "channels are padded to it")
            if before < 0 or after < 0 or not constant:
                return tracer.constraints.freeze(nodes, "its channels are padded in a way that is not followed")
            shape = list(nodes.shape)
            parts = [torch.full([*shape[:dim], n, *shape[dim + 1 :]], filler) for n in (before, after)]
            nodes = torch.cat([parts[0], nodes, parts[1]], dim)
    tracer.set(call.result, nodes)
    return None


@register_rule("view_as_complex")
def as_complex(tracer: Tracer, call: Call) -> None:
    """Pairs of numbers as complex ones (rotary embeddings): both belong to the same channel from here on."""
    value = tracer.value(call["self"])
    assert value is not None
    if value.source is None and value.nodes.shape[-1] > 1:
        for pair in value.nodes.reshape(-1, 2).unique(dim=0).tolist():
            tracer.constraints.together.append(tuple(map(when_carried, pair)))
    tracer.values[call.result] = value.moved(lambda f: f.select(-1, 0))


@register_rule("view_as_real")
def as_real(tracer: Tracer, call: Call) -> None:
    """Complex numbers as pairs, of one channel each."""
    value = tracer.value(call["self"])
    assert value is not None
    tracer.values[call.result] = value.moved(lambda f: f.unsqueeze(-1).expand(*f.shape, 2))


@register_rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def shuffle(tracer: Tracer, call: Call) -> None:
    """Shuffles of blocks of channels, which are removed as blocks."""
    tensor, value = call["self"], tracer.value(call["self"])
    if value is None or value.source is not None:
        return tracer.keep_all([tensor], "it is shuffled")
    others = {k: v for k, v in call.arguments.items() if k != "self"}
    moved = compress(call.func(value.nodes.expand(value.shape).contiguous(), **others))
    dim = tensor.dim() - 3 if "shuffle" in call.name and "pixel" in call.name else 1
    if value.varies() not in ([], [dim]):
        tracer.constraints.keep_all(value.nodes, "it is shuffled in an unusual layout")
    elif call.name == "pixel_shuffle":  # r*r channels become one: they are removed together
        blocks = value.nodes.reshape(-1).expand(tensor.shape[dim]).view(-1, call["upscale_factor"] ** 2)
        for block in blocks.tolist():
            tracer.constraints.together.append(tuple(map(when_carried, block)))
        first = blocks[:, 0].view(-1, *[1] * (tensor.dim() - dim - 1))
        moved = first.view([1] * dim + list(first.shape))
    elif "channel" in call.name:
        blocks = value.nodes.reshape(-1).expand(tensor.shape[dim]).view(call["groups"], -1)
        for block in blocks.t().tolist():
            tracer.constraints.together.append(tuple(map(when_carried, block)))
    tracer.set(call.result, moved)
    return None


def pairwise(first: Tensor, second: Tensor, combine: Any) -> Tensor:
    """Combine two fields of nodes entry by entry, each distinct pair once."""
    if first.dim() < second.dim():
        first, second = second, first
    second = second.view((1,) * (first.dim() - second.dim()) + second.shape)
    first, second = torch.broadcast_tensors(first, second)
    if not first.numel():
        return first
    span = int(max(first.max(), second.max())) + 1
    pairs, inverse = torch.unique(first * span + second, return_inverse=True)
    combined = [combine(*divmod(pair, span)) for pair in pairs.tolist()]
    return torch.tensor(combined, dtype=torch.int64)[inverse]

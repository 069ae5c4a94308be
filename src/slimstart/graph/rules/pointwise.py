"""Pointwise operations: activations, additions, gates, scales.

For an operation on one tensor the only question is whether it keeps zeros; the answer is found by running it on a zero.
Of two tensors, an addition allows different masks (filter coupling), and every other operation ties their channels.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from slimstart.graph.constraints import Layout, when_carried
from slimstart.graph.rules.register import operation_name, register_rule
from slimstart.graph.rules.shapes import move, pairwise
from slimstart.graph.tracer import Call, Tracer, Value

ADDITIONS = frozenset({"add", "sub", "rsub", "subtract"})
UNTAGGED = (  # pointwise operations that some releases of PyTorch do not tag as such
    "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "silu", "mish", "gelu", "elu", "celu", "selu", "softplus",
    "leaky_relu", "threshold", "sigmoid", "tanh", "log_sigmoid", "logsigmoid", "hardshrink", "softshrink", "softsign",
    "tanhshrink", "where", "masked_fill", "clamp", "clip", "square", "maximum", "minimum", "lerp", "addcmul", "addcdiv",
)  # fmt: skip


@register_rule("pointwise", *UNTAGGED)
def pointwise(tracer: Tracer, call: Call) -> None:
    """Any operation that PyTorch tags as pointwise."""
    tensors = [leaf for leaf in tree_flatten(call.arguments)[0] if isinstance(leaf, Tensor)]
    followed = [t for t in tensors if tracer.activation(t) is not None]
    if not isinstance(call.result, Tensor) or any(t.dim() > call.result.dim() for t in followed):
        return tracer.keep_all(tensors, f"operation {call.name} has no rule (slimstart.register_rule adds one)")
    additive = operation_name(call.func) in ADDITIONS
    if not followed:
        if not (additive and _sum_of_parameters(tracer, call, tensors)):
            _parameters_only(tracer, call, tensors)
        return None
    followed = _without_those_met_by_all(tracer, followed, call.result.dim(), additive)
    nodes = _combined(tracer, call, followed, additive)
    if nodes is None:
        return None
    for tensor in tensors:
        if tensor.numel() > 1 and not any(tensor is other for other in followed):
            written = _written_to(tracer, nodes, tensor) if additive else None
            if written is None:
                nodes = _with_fixed(tracer, nodes, tensor, additive)
            else:
                nodes = pairwise(nodes, written, tracer.constraints.added)
                followed = [*followed, tensor]
    if not keeps_zero(call, followed):
        nodes = changed(tracer, nodes)
    return store(tracer, call, nodes)


def _without_those_met_by_all(tracer: Tracer, followed: list[Tensor], dims: int, additive: bool) -> list[Tensor]:
    """The operands apart from those of which every channel meets all channels of another: those are always kept.

    Examples are a gate with a single channel, and an outer product of two vectors.
    """
    values = [tracer.activation(tensor) for tensor in followed]
    varying = [{d + dims - len(v.shape) for d in v.varies()} for v in values if v is not None]
    sizes = [v.nodes.numel() for v in values if v is not None]
    # The largest is followed; one that varies along the first dimension, which has examples or boxes, is only the last.
    main = max(zip(varying, sizes, strict=True), key=lambda one: (0 not in one[0], one[1]))[0]
    disjoint = [not mine or not (additive or mine & main) for mine in varying]
    apart = [tensor for tensor, met in zip(followed, disjoint, strict=True) if met and main]
    tracer.keep_all(apart, "it is combined with every channel of another tensor")
    return [t for t in followed if not any(t is one for one in apart)]


def keeps_zero(call: Call, followed: list[Tensor]) -> bool:
    """Whether the result is zero where the followed tensors are; found by running it, with ones for the others."""
    if operation_name(call.func) == "where":  # returns one side or the other: one run says nothing of the other side
        return False

    def sample(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.full((), 0 if any(leaf is t for t in followed) else 1, dtype=leaf.dtype)

    try:
        outcome = call.func(**{k: tree_map(sample, v) for k, v in call.arguments.items()})
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return isinstance(outcome, Tensor) and bool((outcome == 0).all())


def changed(tracer: Tracer, nodes: Tensor) -> Tensor:
    """The nodes after an operation per channel that does not keep zeros."""
    distinct, inverse = torch.unique(nodes, return_inverse=True)
    after = [tracer.constraints.pass_on(node, zero_preserving=False) for node in distinct.tolist()]
    return torch.tensor(after, dtype=torch.int64)[inverse]


def store(tracer: Tracer, call: Call, nodes: Tensor) -> None:
    """Set the nodes of the result, which for an in-place form is its first argument."""
    result: Tensor = call.result
    if call.func._schema.is_mutable and result is call.subject:
        tracer.write(result, nodes)
    else:
        tracer.set(result, nodes)


def _aligned(nodes: Tensor, dims: int) -> Tensor:
    return nodes.view((1,) * (dims - nodes.dim()) + nodes.shape)


def _combined(tracer: Tracer, call: Call, followed: list[Tensor], additive: bool) -> Tensor | None:
    """The nodes of the result from those of all followed operands; None where they cannot be combined."""
    dims = call.result.dim()
    fields = [_aligned(tracer.activation(t).nodes, dims) for t in followed]  # type: ignore[union-attr]
    merged = fields[0]
    for nodes in fields[1:]:
        mine = {d for d in range(dims) if merged.shape[d] > 1}
        theirs = {d for d in range(dims) if nodes.shape[d] > 1}
        if not (mine <= theirs or theirs <= mine):
            tracer.keep_all(followed, "channels of different dimensions are combined")
            return None
        combine = tracer.constraints.added if additive and mine == theirs else tracer.constraints.multiplied
        merged = pairwise(merged, nodes, combine)
    return merged


def _with_fixed(tracer: Tracer, nodes: Tensor, tensor: Tensor, additive: bool) -> Tensor:
    """The nodes after channels are combined with a parameter or a constant.

    A scale, and a bias on channels that one layer writes, shrink with the channels. Anything else that has an entry per
    channel and is added is a writer that is always there. A constant that is multiplied cannot shrink, so neither can
    the channels.
    """
    dims, parameter = nodes.dim(), tracer.parameter(tensor)
    extent = _extent(tensor, dims)
    met = [d for d in range(dims) if nodes.shape[d] > 1 and extent[d] > 1]
    if not met:
        return nodes
    shrinks = not additive or _is_bias(tracer, nodes, tensor, met)
    if shrinks and parameter is not None and _goes_with(tracer, parameter, nodes, met):
        return nodes
    if parameter is not None:
        tracer.pin(parameter, "it is added to channels that others write too" if additive else "it is not followed")
    if additive:
        return pairwise(nodes, torch.zeros((1,) * dims, dtype=torch.int64), tracer.constraints.added)
    reason = "it meets a tensor of fixed size"
    tracer.constraints.layouts.append(Layout(nodes, (None,) * dims, frozenset(met), reason))
    return nodes


def _goes_with(tracer: Tracer, parameter: Value, nodes: Tensor, met: list[int]) -> bool:
    """Let a parameter shrink with the channels that it meets along some dimensions; returns whether it can.

    Where channels are heads with a width, and it does not have an entry for each of them, heads can go.
    """
    constraints, dims = tracer.constraints, nodes.dim()
    assert parameter.source is not None
    fields = [_aligned(f, dims) for f in parameter.fields]
    running = [d for d, f in enumerate(fields) if any(f.shape[m] > 1 for m in met)]
    varying = [d for d in range(dims) if nodes.shape[d] > 1]
    if len(running) == 1 and [d for d in range(dims) if fields[running[0]].shape[d] > 1] == varying:
        along, rows = (running[0], fields[running[0]].reshape(-1).tolist()), nodes
    elif met[0] == varying[0] and (found := along_dimension(parameter, met[0], dims)) is not None:
        along, rows = found, nodes.movedim(met[0], 0).flatten(1)[:, 0]
        layout = Layout(nodes, (None,) * dims, frozenset(varying[1:]), "it meets a parameter with an entry per head")
        constraints.layouts.append(layout)
    else:
        return False
    constraints.follow(parameter.source, *along, [when_carried(node) for node in rows.reshape(-1).tolist()])
    return True


def _is_bias(tracer: Tracer, nodes: Tensor, tensor: Tensor, met: list[int]) -> bool:
    """Whether a parameter that is added goes with the channels: one layer writes them, or they are scores of heads."""
    known = nodes.unique().tolist()
    if tracer.constraints.products.issuperset(known):
        return True  # a head that is dropped has no score, so a bias of attention heads goes with it
    live = map(tracer.constraints.live.__getitem__, known)
    entries = math.prod(_extent(tensor, nodes.dim())[d] for d in met)
    return tensor.numel() == entries and all(one is not None and len(one) <= 1 for one in live)


def _written_to(tracer: Tracer, nodes: Tensor, tensor: Tensor) -> Tensor | None:
    """The nodes of a parameter that is added to channels that others write, too; None for anything else."""
    dims, parameter = nodes.dim(), tracer.parameter(tensor)
    extent = (1,) * (dims - tensor.dim()) + tensor.shape
    met = [d for d in range(dims) if nodes.shape[d] > 1 and extent[d] > 1]
    if parameter is None or len(met) != 1 or nodes.numel() != nodes.shape[met[0]]:
        return None
    if _is_bias(tracer, nodes, tensor, met):
        return None
    return tracer.parameter_writes(parameter, met[0], dims)


def along_dimension(parameter: Value, dim: int, dims: int) -> tuple[int, list[int]] | None:
    """The dimension of a parameter that lies along `dim`, and its indices there; None if that is not one dimension."""
    fields = [_aligned(f, dims) for f in parameter.fields]
    running = [d for d, f in enumerate(fields) if f.shape[dim] > 1]
    if len(running) != 1 or fields[running[0]].numel() != fields[running[0]].shape[dim]:
        return None
    return running[0], fields[running[0]].reshape(-1).tolist()


def _parameters_only(tracer: Tracer, call: Call, tensors: list[Tensor]) -> None:
    """Follow a function of one parameter, which has the same indices; what it is combined with has a fixed size.

    Of several parameters, the one with a dimension along which all others are of length one is followed.
    """
    dims = call.result.dim()
    extents = [_extent(t, dims) for t in tensors]
    values = {i: v for i, v in enumerate(map(tracer.parameter, tensors)) if v is not None}
    large = [i for i, tensor in enumerate(tensors) if tensor.numel() > 1]
    own = [
        i for i in values
        if any(extents[i][d] > 1 and all(extents[j][d] == 1 for j in large if j != i) for d in range(dims))
    ]  # fmt: skip
    main = next(iter(values)) if len(values) == 1 and len(large) <= 1 else own[0] if len(own) == 1 else None
    for i, value in values.items():
        if i != main:
            tracer.pin(value, "it is computed with before it is used")
    if main is None:
        return
    value = values[main]
    fields = tuple(_aligned(f, dims) for f in value.fields)
    for source_dim, field in enumerate(fields):  # indices that lie along a dimension of fixed size cannot go
        if any(field.shape[d] > 1 and extents[j][d] > 1 for j in large if j != main for d in range(dims)):
            indices = field.unique().tolist()
            tracer.constraints.follow(value.source or "", source_dim, indices, [0] * len(indices))
    if call.result is not call.arguments.get("self"):
        tracer.values[call.result] = Value(fields, call.result.shape, value.source)


def _sum_of_parameters(tracer: Tracer, call: Call, tensors: list[Tensor]) -> bool:
    """Follow a sum of parameters that meet along one dimension: a class token and its position, as channels."""
    dims, large = call.result.dim(), [tensor for tensor in tensors if tensor.numel() > 1]
    met = [d for d in range(dims) if sum(_extent(tensor, dims)[d] > 1 for tensor in large) > 1]
    values = [tracer.parameter(tensor) for tensor in large]
    if len(large) < 2 or len(met) != 1:
        return False
    written = [None if value is None else tracer.parameter_writes(value, met[0], dims) for value in values]
    nodes = [one for one in written if one is not None]
    if len(nodes) < len(large):
        return False
    tracer.set(call.result, reduce(partial(pairwise, combine=tracer.constraints.added), nodes))
    return True


def _extent(tensor: Tensor, dims: int) -> tuple[int, ...]:
    return (1,) * (dims - tensor.dim()) + tuple(tensor.shape)


def pass_through(tracer: Tracer, call: Call, source: Any, zero_preserving: bool) -> None:
    """Give the result the channels of one input."""
    value = tracer.activation(source)
    if value is None:
        return tracer.keep_all([source], f"{call.name} is applied to a parameter")
    return store(tracer, call, value.nodes if zero_preserving else changed(tracer, value.nodes))


@register_rule("dropout", "feature_dropout", "native_dropout", "rrelu")
def dropout(tracer: Tracer, call: Call) -> None:
    """Dropout, which keeps zeros."""
    if isinstance(call.result, tuple):  # native_dropout: result and mask
        call = Call(call.name, call.arguments, call.result[0], call.written, call.func)
    pass_through(tracer, call, call.subject, zero_preserving=True)


@register_rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "bernoulli")
@register_rule("alpha_dropout", "feature_alpha_dropout")
def like(tracer: Tracer, call: Call) -> None:
    """New tensors of the same shape, which shrink together with it."""
    if tracer.activation(call.subject) is not None:
        pass_through(tracer, call, call.subject, zero_preserving=False)


@register_rule("zero", "fill")
def fill(tracer: Tracer, call: Call) -> None:
    """One number for all entries: those of a copy of a parameter remain what they are, whichever exist (Swin V2)."""
    if tracer.parameter(call["self"]) is None:
        tracer.keep_all([call["self"]], "it is written over")


@register_rule("copy")
def copy(tracer: Tracer, call: Call) -> None:
    """A copy into a tensor that is as wide: from then on its channels are those that are copied."""
    target, source = call["self"], call["src"]
    before, value = tracer.activation(target), tracer.activation(source)
    if before is None and value is None:
        return tracer.keep_all([target, source], "it is written over")
    if before is None or value is None or before.nodes.shape != (nodes := _aligned(value.nodes, target.dim())).shape:
        tracer.keep_all([target, source], "it is copied into a tensor of another size")
        return tracer.write(target, torch.zeros((1,) * target.dim(), dtype=torch.int64))
    for pair in torch.stack([before.nodes, nodes], -1).view(-1, 2).unique(dim=0).tolist():
        tracer.constraints.equally_wide(*pair)
    return tracer.write(target, nodes)


@register_rule("expand_as", "view_as", "reshape_as")
def as_other(tracer: Tracer, call: Call) -> None:
    """Operations that take their sizes from another tensor, so that both must be equally wide."""
    before, after = _extent(call["self"], call.result.dim()), call.result.shape
    value, other = tracer.activation(call["self"]), tracer.activation(call["other"])
    if call.name == "expand_as" and other is not None and (value is None or not value.varies()):
        stretched = [d for d in other.varies() if before[d] == 1]
        if tracer.parameter(call["self"]) is None and stretched == other.varies():
            tracer.keep_all([call["self"]], "it is combined with every channel of another tensor")
            return tracer.set(call.result, changed(tracer, other.nodes))
    move(tracer, call)
    if tracer.parameter(call["self"]) is not None:
        return None
    moved = tracer.activation(call.result)
    constant = torch.zeros((1,) * len(after), dtype=torch.int64)
    fields = [constant if found is None else found.nodes for found in (moved, other)]
    for dim in range(len(after)):
        free = call.name == "expand_as" and before[dim] == 1  # it is stretched to any size
        if not free and any(field.shape[dim] > 1 for field in fields):
            first, second = (field.movedim(dim, 0).flatten(1)[:, 0].expand(after[dim]).tolist() for field in fields)
            for pair in set(zip(first, second, strict=True)):
                tracer.constraints.equally_wide(*pair)
    return None


@register_rule("to", "_to_copy", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision")
@register_rule(
    "clone", "contiguous", "alias", "detach", "lift_fresh", "positive", "conj", "resolve_conj", "resolve_neg"
)
def same(tracer: Tracer, call: Call) -> None:
    """Operations that change neither position nor value, except for the type."""
    value = tracer.value(call["self"])
    if value is not None and call.result is not call["self"]:
        tracer.values[call.result] = value


@register_rule("prelu", "_prelu_kernel")
def prelu(tracer: Tracer, call: Call) -> None:
    """PReLU, with one slope per channel or one for all."""
    tensor, weight = call["self"], call["weight"]
    parameter = tracer.parameter(weight)
    if weight.numel() > 1:
        nodes = tracer.channels(tensor, 1) if tensor.dim() > 1 else None
        if nodes is None or parameter is None or parameter.source is None:
            tracer.keep_all([tensor, weight], "its slopes are not followed")
        else:
            presences = [when_carried(node) for node in nodes]
            tracer.constraints.follow(parameter.source, 0, parameter.fields[0].reshape(-1).tolist(), presences)
            if (module := tracer.boundary(parameter.source)) is not None:
                tracer.constraints.counts_channels(module, "num_parameters", presences)
    if tracer.activation(tensor) is not None:
        pass_through(tracer, call, tensor, zero_preserving=True)

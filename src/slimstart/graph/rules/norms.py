"""Normalisation: one per channel is removed with the channel; one over channels needs all, or runs over what exists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slimstart.graph.constraints import Count, Layout, ParameterIndices, Presence, when_carried, when_live
from slimstart.graph.rules.pointwise import changed
from slimstart.graph.rules.register import register_rule
from slimstart.graph.rules.shapes import argument_as_written
from slimstart.graph.sizes import Expression, expression_of
from slimstart.graph.tracer import Call, Tracer, Value


def per_channel_layer(
    tracer: Tracer,
    tensor: Tensor,
    result: Tensor,
    dim: int,
    vectors: Sequence[Tensor | None],
    sources: Sequence[int] | None = None,
) -> tuple[list[Presence], list[Presence]] | None:
    """Follow a layer that treats every channel separately, with vectors (or filters) of one entry per channel.

    Called as a module it can have ports: it reads the live channels of a stream and writes the same ones.

    Args:
        dim: the channel dimension.
        vectors: parameters and buffers with one entry per output channel along their first dimension.
        sources: for every output channel the input channel that it comes from; the same one by default.

    Returns:
        When each input and each output channel exists; None if the input is not laid out along `dim`.
    """
    nodes = tracer.channels(tensor, dim)
    if nodes is None:
        tracer.keep_all([tensor, *vectors], "its channels are not along one dimension")
        return None
    values = [tracer.parameter(v) for v in vectors if v is not None]
    sources = range(len(nodes)) if sources is None else sources
    if any(v is None for v in values):  # a vector that is computed cannot shrink
        tracer.keep_all([tensor, *vectors], "its parameters are computed")
        return None
    named = next((v.source for v in values if v is not None), None)
    module = tracer.boundary(named)
    constraints = tracer.constraints
    if module is None:
        outputs = [constraints.pass_on(nodes[i], zero_preserving=False) for i in sources]
        when = when_carried
    else:
        outputs = [constraints.layer_output(module, out, nodes[i]) for out, i in enumerate(sources)]
        when = when_live
        constraints.port(constraints.reads, module, dim - tensor.dim(), nodes)
        constraints.port(constraints.writes, module, dim - result.dim(), outputs)
    presences = [when(nodes[i]) for i in sources]
    for value in values:
        assert value is not None
        assert value.source is not None
        constraints.follow(value.source, 0, value.fields[0].reshape(-1).expand(len(sources)).tolist(), presences)
    tracer.set_channels(result, dim, outputs)
    return [when(node) for node in nodes], presences


@register_rule("batch_norm", "native_batch_norm", "instance_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
def batch_norm(tracer: Tracer, call: Call) -> None:
    """Batch and instance normalisation, whose weight, bias and statistics belong to the channel."""
    if (value := tracer.parameter(call["input"])) is not None:
        return _standardised(tracer, call, value)
    vectors = [call["weight"], call["bias"], call["running_mean"], call["running_var"]]
    result = call.result[0] if isinstance(call.result, tuple) else call.result
    found = per_channel_layer(tracer, call["input"], result, 1, vectors)
    module = tracer.modules[-1]
    if found is not None and module in tracer.native:
        tracer.constraints.counts_channels(module, "num_features", found[1])


def _standardised(tracer: Tracer, call: Call, value: Value) -> None:
    """A weight of shape (1, filters, fan-in) that is standardised by filter (BiT, NFNet): it runs over what exists."""
    vectors = [tracer.value(vector) for vector in (call["weight"], call["bias"]) if vector is not None]
    followed = [v for v in vectors if v is not None]
    filters = tracer.indices_along(value, 1)
    own = [tracer.indices_along(v, 0) for v in followed if v.source is not None]
    written = call.written and getattr(call.written[0], "__name__", "") == "batch_norm"
    if filters is None or len(own) < len(followed) or None in own or call["running_mean"] is not None or not written:
        return tracer.keep_all([call["input"], call["weight"], call["bias"]], "its weight is computed")
    for vector in own:
        assert vector is not None
        tracer.constraints.followers.append((vector, filters))
    key = tracer.call_key
    for dim, field in enumerate(value.fields):
        if field.shape[2] > 1 and field.shape[1] == 1:
            found = ParameterIndices(
                filters.parameter, dim, tuple(field.expand(1, 1, value.shape[2]).flatten().tolist())
            )
            tracer.constraints.parameter_norms.append((key, -1, found))
    tracer.values[call.result[0] if isinstance(call.result, tuple) else call.result] = value
    return None


@register_rule("_weight_norm_interface")
def weight_norm(tracer: Tracer, call: Call) -> None:
    """A direction scaled to a length along one dimension: both go together there.

    Entries of the other dimensions can be dropped, because zeros add nothing to the length.
    """
    direction, length, dim = tracer.parameter(call["v"]), tracer.parameter(call["g"]), call["dim"] % call["v"].dim()
    if direction is None or length is None:
        return tracer.keep_all([call["v"], call["g"]], "its weight is computed")
    tracer.values[call.result[0]] = direction
    found, own = tracer.indices_along(direction, dim), tracer.indices_along(length, dim)
    written = call.written and getattr(call.written[0], "__name__", "") == "_weight_norm"
    if found is None or own is None or not written:
        tracer.keep_all([call["g"]], "weight norm divides by the length of its direction")
        if found is not None:
            tracer.constraints.follow(found.parameter, found.dim, found.indices, [0] * len(found.indices))
        return None
    tracer.constraints.followers.append((own, found))
    tracer.constraints.row_norms.append((tracer.call_key, dim - call["v"].dim(), found))
    return None


@register_rule("group_norm")
def group_norm(tracer: Tracer, call: Call) -> None:
    """Group normalisation: the channels of one norm group are removed together."""
    tensor, groups = call["input"], call["num_groups"]
    nodes = tracer.channels(tensor, 1)
    if groups == 1 and nodes is not None and _one_group_shrinks(tracer, call):
        return tracer.set(call.result, changed(tracer, tracer.activation(tensor).nodes))  # type: ignore[union-attr]
    if groups == 1 or nodes is None or call["weight"] is None:
        whole = [tensor, call["weight"], call["bias"]] if nodes is None else [tensor]
        return _keep_all(tracer, whole)
    size = len(nodes) // groups
    found = per_channel_layer(tracer, tensor, call.result, 1, [call["weight"], call["bias"]])
    if found is None:
        return None
    inputs, outputs = found
    for group in range(groups):
        members = slice(group * size, (group + 1) * size)
        tracer.constraints.together.append((*inputs[members], *map(when_carried, nodes[members])))
    if (module := tracer.modules[-1]) in tracer.native:
        tracer.constraints.counts_channels(module, "num_channels", outputs)
        tracer.constraints.counts_channels(module, "num_groups", inputs[::size])
    else:
        expression = argument_as_written(call, "num_groups", 1)
        count_groups(tracer, nodes[::size], expression)
    return None


def count_groups(tracer: Tracer, nodes: Sequence[int], expression: Expression | int) -> None:
    """Let a number of groups count these channels, one of each group."""
    where = f"a number of groups in {tracer.modules[-1] or 'the forward'}"
    tracer.constraints.counts.append(Count(tuple((node,) for node in nodes), expression, where))


def _one_group_shrinks(tracer: Tracer, call: Call) -> bool:
    """Let a group norm with one group run over the channels that exist; returns whether it can."""
    vectors = [call["weight"], call["bias"]]
    if not all(_follows(tracer, vector, -1) for vector in vectors):
        return False
    presences = tracer.shrinks_over(call["input"], 1)
    if presences is None:
        return False
    if tracer.modules[-1] in tracer.native:
        tracer.constraints.counts_channels(tracer.modules[-1], "num_channels", presences)
    for vector in vectors:
        _follow(tracer, vector, -1, presences)
    return True


@register_rule("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(tracer: Tracer, call: Call) -> None:
    """Layer normalisation: over channels a zero is not neutral, so all are kept, or it runs over those that exist."""
    tensor = call["input"]
    value = tracer.activation(tensor) or tracer.begin_stream(tensor, -1)
    result = call.result[0] if isinstance(call.result, tuple) else call.result
    if value is None:
        return tracer.keep_all([tensor], "it is normalised")
    first = tensor.dim() - len(call["normalized_shape"])
    over = [dim for dim in value.varies() if dim >= first]
    if over and len(over) < len(value.varies()):  # within heads: only whole heads can be removed
        reason = "it is normalised within heads"
        tracer.constraints.layouts.append(Layout(value.nodes, (None,) * tensor.dim(), frozenset(over), reason))
    elif over and not (len(over) == 1 and _layer_norm_shrinks(tracer, call, over[0])):
        return _keep_all(tracer, [tensor])
    tracer.set(result, changed(tracer, value.nodes))
    return None


def _layer_norm_shrinks(tracer: Tracer, call: Call, dim: int) -> bool:
    """Let a layer or RMS norm run over the channels that exist; returns whether it can."""
    tensor, vectors = call["input"], [call["weight"], call.arguments.get("bias")]
    asked = _shape_as_written(call)
    if asked is None or not all(_follows(tracer, vector, dim - tensor.dim()) for vector in vectors):
        return False
    if isinstance(asked, torch.Size) and (vectors[0] is None or asked != vectors[0].shape):
        return False  # of a tensor that is not known to shrink
    presences = tracer.shrinks_over(tensor, dim)
    if presences is None:
        return False
    module, position = tracer.modules[-1], dim - tensor.dim() + len(asked)
    if (shape := tracer.shapes.get(module)) is not None and shape is asked:
        tracer.constraints.counts_channels(module, f"normalized_shape[{position}]", presences)
    elif not isinstance(asked, torch.Size):
        size = asked[position]
        nodes: list[list[int]] = [[presence // 2] for presence in presences]
        reason = f"its size is given to {module}"
        tracer.constraints.counts.append(Count(tuple(map(tuple, nodes)), expression_of(size), reason))
    for vector in vectors:
        _follow(tracer, vector, dim - tensor.dim(), presences)
    return True


def _shape_as_written(call: Call) -> Sequence[int] | None:
    """The shape that the user gave to `layer_norm` or `rms_norm`, the same object; None if it is not known."""
    if not call.written or getattr(call.written[0], "__name__", "") not in ("layer_norm", "rms_norm"):
        return None
    _, args, kwargs = call.written
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
    return shape if isinstance(shape, Sequence) else None


def _follows(tracer: Tracer, vector: Tensor | None, dim: int) -> bool:
    """Whether a weight or bias with an entry per channel along `dim`, counted from the end, can shrink."""
    value = tracer.parameter(vector)
    return vector is None or (value is not None and sum(field.shape[dim] > 1 for field in value.fields) == 1)


def _follow(tracer: Tracer, vector: Tensor | None, dim: int, presences: Sequence[Presence]) -> None:
    """Let a weight or bias shrink with the channels."""
    value = tracer.parameter(vector)
    if value is not None and value.source is not None:
        own = next(d for d, field in enumerate(value.fields) if field.shape[dim] > 1)
        tracer.constraints.follow(value.source, own, value.fields[own].reshape(-1).tolist(), presences)


def _keep_all(tracer: Tracer, tensors: Sequence[Tensor | None]) -> None:
    """Keep all channels of what is normalised over channels."""
    tracer.keep_all(tensors, f"it is normalised over its channels in {tracer.modules[-1]}")
    tracer.constraints.unfollowed.setdefault(tracer.modules[-1], "normalises over its channels, so none can be removed")


def _source(tracer: Tracer, tensor: Tensor | None) -> str | None:
    value = tracer.parameter(tensor)
    return value.source if value is not None else None

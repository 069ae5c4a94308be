"""Normalisation: one per channel is removed with the channel; one over channels needs all of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slimstart.graph.constraints import Layout, Presence, when_carried, when_live
from slimstart.graph.rules.pointwise import changed
from slimstart.graph.rules.register import register_rule
from slimstart.graph.tracer import Call, Tracer


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
    vectors = [call["weight"], call["bias"], call["running_mean"], call["running_var"]]
    result = call.result[0] if isinstance(call.result, tuple) else call.result
    found = per_channel_layer(tracer, call["input"], result, 1, vectors)
    module = tracer.modules[-1]
    if found is not None and module in tracer.native:
        tracer.constraints.counts_channels(module, "num_features", found[1])


@register_rule("group_norm")
def group_norm(tracer: Tracer, call: Call) -> None:
    """Group normalisation: the channels of one norm group are removed together."""
    tensor, groups = call["input"], call["num_groups"]
    nodes = tracer.channels(tensor, 1)
    if groups == 1 or nodes is None or tracer.boundary(_source(tracer, call["weight"])) is None:
        whole = [tensor, call["weight"], call["bias"]] if nodes is None else [tensor]
        tracer.keep_all(whole, "it is normalised over its channels")
        tracer.constraints.unfollowed.setdefault(
            tracer.modules[-1], "normalises over its channels, so none can be removed"
        )
        return
    size = len(nodes) // groups
    found = per_channel_layer(tracer, tensor, call.result, 1, [call["weight"], call["bias"]])
    if found is None:
        return
    inputs, outputs = found
    for group in range(groups):
        members = slice(group * size, (group + 1) * size)
        tracer.constraints.together.append((*inputs[members], *map(when_carried, nodes[members])))
    module = tracer.modules[-1]
    tracer.constraints.counts_channels(module, "num_channels", outputs)
    tracer.constraints.counts_channels(module, "num_groups", inputs[::size])


@register_rule("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(tracer: Tracer, call: Call) -> None:
    """Layer normalisation: over channels a zero is not neutral, so none can be removed; otherwise it is per channel."""
    tensor = call["input"]
    value = tracer.activation(tensor)
    result = call.result[0] if isinstance(call.result, tuple) else call.result
    if value is None:
        return tracer.keep_all([tensor], "it is normalised")
    first = tensor.dim() - len(call["normalized_shape"])
    over = [dim for dim in value.varies() if dim >= first]
    if over and len(over) < len(value.varies()):  # within heads: only whole heads can be removed
        reason = "it is normalised within heads"
        tracer.constraints.layouts.append(Layout(value.nodes, (None,) * tensor.dim(), frozenset(over), reason))
    elif over:
        tracer.keep_all([tensor], f"it is normalised over its channels in {tracer.modules[-1]}")
        tracer.constraints.unfollowed.setdefault(
            tracer.modules[-1], "normalises over its channels, so none can be removed"
        )
        return None
    tracer.set(result, changed(tracer, value.nodes))
    return None


def _source(tracer: Tracer, tensor: Tensor | None) -> str | None:
    value = tracer.parameter(tensor)
    return value.source if value is not None else None

"""Normalisation: per channel it goes with the channel; over channels it needs all of them."""

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
    """A layer that changes every channel within itself, with vectors (or filters) of one entry per channel.

    Called as a module it is a place where the stream may be narrower: it reads what is live and writes the same back.

    Args:
        dim: the channel dimension.
        vectors: parameters and buffers whose first dimension runs over the output channels.
        sources: for every output channel the input channel it comes from; the same one by default.

    Returns:
        When each input and each output channel exists; None if the input is not laid out along `dim`.
    """
    nodes = tracer.channels(tensor, dim)
    if nodes is None:
        tracer.keep_whole([tensor, *vectors], "its channels are not along one dimension")
        return None
    values = [tracer.parameter(v) for v in vectors if v is not None]
    sources = range(len(nodes)) if sources is None else sources
    if any(v is None for v in values):  # a vector that is computed: it cannot be cut
        tracer.keep_whole([tensor, *vectors], "its parameters are computed")
        return None
    named = next((v.source for v in values if v is not None), None)
    module = tracer.boundary(named)
    ledger = tracer.ledger
    if module is None:
        outputs = [ledger.pass_on(nodes[i], zero_preserving=False) for i in sources]
        when = when_carried
    else:
        outputs = [ledger.layer_output(module, out, nodes[i]) for out, i in enumerate(sources)]
        when = when_live
        ledger.port(ledger.reads, module, dim - tensor.dim(), nodes)
        ledger.port(ledger.writes, module, dim - result.dim(), outputs)
    presences = [when(nodes[i]) for i in sources]
    for value in values:
        assert value is not None
        assert value.source is not None
        ledger.follow(value.source, 0, value.fields[0].reshape(-1).expand(len(sources)).tolist(), presences)
    tracer.set_channels(result, dim, outputs)
    return [when(node) for node in nodes], presences


@register_rule("batch_norm", "native_batch_norm", "instance_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
def batch_norm(tracer: Tracer, call: Call) -> None:
    """Batch and instance normalisation: weight, bias and statistics go with the channel."""
    vectors = [call["weight"], call["bias"], call["running_mean"], call["running_var"]]
    result = call.result[0] if isinstance(call.result, tuple) else call.result
    found = per_channel_layer(tracer, call["input"], result, 1, vectors)
    module = tracer.modules[-1]
    if found is not None and module in tracer.native:
        tracer.ledger.counts_channels(module, "num_features", found[1])


@register_rule("group_norm")
def group_norm(tracer: Tracer, call: Call) -> None:
    """The channels of one norm group stay or go together."""
    tensor, groups = call["input"], call["num_groups"]
    nodes = tracer.channels(tensor, 1)
    if groups == 1 or nodes is None or tracer.boundary(_source(tracer, call["weight"])) is None:
        whole = [tensor, call["weight"], call["bias"]] if nodes is None else [tensor]
        tracer.keep_whole(whole, "it is normalised over its channels")
        tracer.ledger.unfollowed.setdefault(tracer.modules[-1], "normalises over its channels, so they stay whole")
        return
    size = len(nodes) // groups
    found = per_channel_layer(tracer, tensor, call.result, 1, [call["weight"], call["bias"]])
    if found is None:
        return
    inputs, outputs = found
    for group in range(groups):
        members = slice(group * size, (group + 1) * size)
        tracer.ledger.together.append((*inputs[members], *map(when_carried, nodes[members])))
    module = tracer.modules[-1]
    tracer.ledger.counts_channels(module, "num_channels", outputs)
    tracer.ledger.counts_channels(module, "num_groups", inputs[::size])


@register_rule("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(tracer: Tracer, call: Call) -> None:
    """Over channels, zero is not neutral: the stream stays whole. Over anything else it is within the channel."""
    tensor = call["input"]
    value = tracer.activation(tensor)
    result = call.result[0] if isinstance(call.result, tuple) else call.result
    if value is None:
        return tracer.keep_whole([tensor], "it is normalised")
    first = tensor.dim() - len(call["normalized_shape"])
    over = [dim for dim in value.varies() if dim >= first]
    if over and len(over) < len(value.varies()):  # within heads: they go as wholes
        reason = "it is normalised within heads"
        tracer.ledger.layouts.append(Layout(value.nodes, (None,) * tensor.dim(), frozenset(over), reason))
    elif over:
        tracer.keep_whole([tensor], f"it is normalised over its channels in {tracer.modules[-1]}")
        tracer.ledger.unfollowed.setdefault(tracer.modules[-1], "normalises over its channels, so they stay whole")
        return None
    tracer.set(result, changed(tracer, value.nodes))
    return None


def _source(tracer: Tracer, tensor: Tensor | None) -> str | None:
    value = tracer.parameter(tensor)
    return value.source if value is not None else None

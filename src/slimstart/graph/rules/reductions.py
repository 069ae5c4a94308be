"""Operations over space or over channels: pooling, resizing, sums, means, maxima, softmax."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from slimstart.graph.constraints import Layout, when_carried
from slimstart.graph.rules.pointwise import changed, pointwise
from slimstart.graph.rules.register import register_rule
from slimstart.graph.rules.shapes import pairwise
from slimstart.graph.tracer import Call, Tracer

_POOLS = [f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp")]
_RESIZES = [f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")]
_RESIZES += ["upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"]
_RESIZES += ["_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]


@register_rule(*_POOLS, *(f"{name}_with_indices" for name in _POOLS if "max" in name), *_RESIZES)
@register_rule(
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"
)
@register_rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def over_space(tracer: Tracer, call: Call) -> None:
    """Pooling and resizing over the spatial dimensions of each channel, which keep zeros."""
    tensor = call.subject
    digits = re.search(r"(\d)d", call.name)
    spatial = int(digits.group(1)) if digits else tensor.dim() - 2
    value = tracer.activation(tensor) or tracer.begin_stream(tensor, -spatial - 1)  # a position embedding is resized
    if value is None:
        return tracer.keep_all([tensor], "a parameter is pooled")
    if any(dim >= tensor.dim() - spatial for dim in value.varies()):
        return tracer.keep_all([tensor], f"{call.name} runs over its channels")
    for result in call.results:
        tracer.set(result, value.nodes)
    return None


def within(tracer: Tracer, nodes: Tensor, over: list[int], reason: str) -> Tensor:
    """Let nothing be removed along the dimensions `over`, where an operation runs over channels; returns the nodes."""
    if over:
        tracer.constraints.layouts.append(Layout(nodes, (None,) * nodes.dim(), frozenset(over), reason))
    return nodes


def _reduced_dims(call: Call, tensor: Tensor) -> list[int]:
    dims: Any = call.arguments.get("dim")
    if dims is None or dims == []:
        return list(range(tensor.dim()))
    return [d % tensor.dim() for d in (dims if isinstance(dims, list | tuple) else [dims])] if tensor.dim() else []


_MEANS = frozenset("mean var std var_mean std_mean".split())


def _ignores_zeros(call: Call) -> bool:
    """Whether a reduction over channels is the same without those that are zero."""
    order = call.arguments.get("ord", call.arguments.get("p", 2))
    is_norm = call.name in ("norm", "linalg_vector_norm")
    return call.name == "sum" or (is_norm and (order is None or float(order) >= 0))


@register_rule(
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "norm", "linalg_vector_norm", "nansum"
)
@register_rule(
    "var_mean", "std_mean", "logsumexp", "any", "all", "argmax", "argmin", "median", "aminmax", "count_nonzero"
)
def reduce(tracer: Tracer, call: Call) -> None:
    """Reductions: over other dimensions the channels remain; over channels, zero is neutral in a sum and in a norm.

    Means and the like may run over the channels that exist.
    """
    tensor = call.subject
    if isinstance(call.arguments.get("other"), Tensor):  # max(x, y)
        return pointwise(tracer, call)
    value = tracer.activation(tensor)
    if value is None:
        return tracer.keep_all([tensor], "a parameter is reduced before it is used")
    dims = _reduced_dims(call, tensor)
    varying = value.varies()
    over = [d for d in dims if d in varying]
    if len(over) == len(varying) > 0:
        # Where zeros may have become something else (a sigmoid's 0.5), they count in a sum, too.
        neutral = _ignores_zeros(call) and tracer.constraints.nonzero.isdisjoint(value.nodes.unique().tolist())
        shrinks = (call.name in _MEANS or _ignores_zeros(call)) and len(over) == 1
        if not neutral and not (shrinks and tracer.shrinks_over(tensor, over[0]) is not None):
            tracer.keep_all([tensor], _over_channels(tracer, call))
        return None  # the result over all channels has none
    nodes = within(tracer, value.nodes, over, _over_channels(tracer, call))
    for dim in over:
        nodes = nodes.narrow(dim, 0, 1)
    for dim in sorted(dims, reverse=True):
        if call.results[0].dim() < tensor.dim():
            nodes = nodes.squeeze(dim)
    if call.name in ("logsumexp", "prod", "all", "argmax", "argmin"):
        nodes = changed(tracer, nodes)
    for result in call.results:
        tracer.set(result, nodes)
    return None


@register_rule(
    "softmax", "log_softmax", "_softmax", "_log_softmax", "softmin", "cumsum", "cumprod", "sort", "topk", "glu"
)
@register_rule("cummax", "cummin", "logcumsumexp", "kthvalue", "cross", "renorm", "msort", "argsort", "normalize")
def along(tracer: Tracer, call: Call) -> None:
    """Operations in which every entry depends on the others along one dimension; no channel may be missing there."""
    tensor = call.subject
    value = tracer.activation(tensor)
    if value is None:
        return tracer.keep_all([tensor], f"{call.name} is applied to a parameter")
    dim = call.arguments.get("dim", -1)
    dim = (-1 if dim is None else dim) % tensor.dim()
    if call.name == "glu" and dim in value.varies():
        return _glu(tracer, call, value.nodes, dim)
    over = [dim] if dim in value.varies() else []
    if over == value.varies() != []:
        return tracer.keep_all([tensor], _over_channels(tracer, call))
    nodes = within(tracer, value.nodes, over, _over_channels(tracer, call))
    for result in call.results:
        tracer.set(result, nodes if call.name == "cumsum" else changed(tracer, nodes))
    return None


def _over_channels(tracer: Tracer, call: Call) -> str:
    return f"{call.name} runs over its channels in {tracer.modules[-1] or 'the forward'}"


def _glu(tracer: Tracer, call: Call, nodes: Tensor, dim: int) -> None:
    """GLU: a * sigmoid(b) of the halves a and b, which shrink together."""
    half = nodes.shape[dim] // 2
    if nodes.numel() != nodes.shape[dim]:
        return tracer.keep_all([call["self"]], "glu in an unusual layout")
    first, second = nodes.narrow(dim, 0, half), nodes.narrow(dim, half, half)
    for pair in torch.stack([first.reshape(-1), second.reshape(-1)], 1).tolist():
        tracer.constraints.together.append(tuple(map(when_carried, pair)))
    tracer.set(call.result, pairwise(first, second, tracer.constraints.multiplied))
    return None

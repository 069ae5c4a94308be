"""Operations that mix channels: convolutions, linear layers, embeddings, products of activations, attention.

Each reads the channels of its input, writes others, and costs multiply-adds. The counts are those of PyTorch's own
`FlopCounterMode`, halved: one multiply-add is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimstart.graph.constraints import CONSTANT, ZERO, Layout, OperationCost, Presence, when_carried, when_live
from slimstart.graph.rules.norms import count_groups, per_channel_layer
from slimstart.graph.rules.pointwise import along_dimension, changed
from slimstart.graph.rules.register import register_rule
from slimstart.graph.rules.shapes import argument_as_written, pairwise
from slimstart.graph.tracer import Call, Tracer, Value


def _cost(tracer: Tracer, total: int, *factors: Sequence[Presence]) -> None:
    """Record `total` multiply-adds, proportional to the number of channels in each factor."""
    if tracer.count_costs:
        coefficient = total // math.prod(len(f) for f in factors)
        tracer.constraints.costs.append(OperationCost(coefficient, tuple(map(tuple, factors)), tracer.modules[-1]))


def _axis(weight: Value, dim: int) -> tuple[int, list[int]] | None:
    """The dimension of a parameter that lies along `dim` of this view of it, and its indices there."""
    running = [d for d, field in enumerate(weight.fields) if field.shape[dim] > 1]
    if not running and weight.shape[dim] == 1:
        running = [d for d, field in enumerate(weight.fields) if field.numel() == 1 and d == dim]
    if len(running) != 1 or weight.fields[running[0]].numel() != weight.shape[dim]:
        return None
    return running[0], weight.fields[running[0]].reshape(-1).tolist()


def mix(
    tracer: Tracer, tensor: Tensor, dim: int, weight: Tensor, dims: tuple[int, int], bias: Tensor | None, result: Tensor
) -> tuple[list[Presence], list[Presence]] | None:
    """Follow a layer that reads all channels along `dim` and writes others there.

    Args:
        dims: the dimensions of `weight` for the outputs and for the inputs.

    Returns:
        When each input and each output channel exists; None if the layer is not followed.
    """
    value, constraints = tracer.parameter(weight), tracer.constraints
    nodes = tracer.channels(tensor, dim)
    axes = [_axis(value, d) for d in dims] if value is not None else [None]
    if value is None or value.source is None or any(axis is None for axis in axes):
        reason = "its weight is computed" if value is None else "its weight is laid out unusually"
        tracer.keep_all([tensor, weight, bias], f"{tracer.modules[-1] or 'the forward'}: {reason}")
        constraints.unfollowed.setdefault(tracer.modules[-1], reason)
        return None
    if nodes is None:  # one channel here is made of several (a linear layer's outputs as an image)
        where = tracer.modules[-1] or "the forward"
        tracer.keep_all([tensor], f"each channel that {where} reads has several of its outputs")
        nodes = [CONSTANT] * tensor.shape[dim]
    (out_dim, outs), (in_dim, ins) = axes  # type: ignore[misc]
    if bias is not None and not tracer.is_vector(bias):
        tracer.keep_all([tensor, weight, bias], "its bias is computed")
        return None
    module = tracer.boundary(value.source)
    when = when_carried if module is None else when_live
    size = tracer.full_sizes[value.source][out_dim]
    layer = tracer.owner(value.source) or value.source
    outputs = constraints.write(value.source, out_dim, size, outs, layer, exact=module is None)
    reading = [when(node) if node > ZERO else CONSTANT for node in nodes]
    constraints.follow(value.source, in_dim, ins, reading)
    writing = [when_live(node) for node in outputs]
    constraints.inputs_of_weights[value.source].add(in_dim)
    tracer.weight = weight
    if bias is not None:
        tracer.follow_vector(bias, writing)
    if module is not None:
        constraints.port(constraints.reads, module, dim - tensor.dim(), nodes)
        constraints.port(constraints.writes, module, dim - tensor.dim(), outputs)
    tracer.set_channels(result, dim, outputs)
    return reading, writing


@register_rule("linear", "mm", "addmm")
def linear(tracer: Tracer, call: Call) -> None:
    """Linear layers: x W^T + b, and its forms on matrices."""
    if call.name == "linear":
        tensor, weight, dims, bias = call["input"], call["weight"], (0, 1), call["bias"]
    else:
        tensor, weight, dims = call.arguments.get("mat1", call["self"]), call["mat2"], (1, 0)
        bias = call["self"] if call.name == "addmm" else None
    total = tensor.numel() * (weight.shape[dims[0]] if weight.dim() > 1 else 1)
    table = tracer.parameter(tensor) if call.name == "linear" and weight.dim() == 2 else None
    if table is not None and tracer.parameter(weight) is not None:  # coordinates, or learned queries
        if tracer.begin_stream(tensor, -1) is None:
            tracer.pin(table, "it is the input of a layer")
    elif tracer.parameter(tensor) is not None or weight.dim() != 2 or tracer.activation(weight) is not None:
        if call.name == "mm" and tracer.parameter(tensor) is None and tracer.parameter(weight) is None:
            return _product(tracer, tensor, weight, call.result, total)
        tracer.keep_all([tensor, weight, bias], "a product that is not followed")
        return _cost(tracer, total)
    if call.name == "addmm" and (call["beta"] != 1 or call["alpha"] != 1):
        tracer.keep_all([tensor, weight, bias], "a scaled product")
        return _cost(tracer, total)
    value, last = tracer.activation(tensor), tensor.dim() - 1
    if value is not None and last not in value.varies() and value.varies():
        return _across(tracer, tensor, weight, bias, call.result, total)
    found = mix(tracer, tensor, last, weight, dims, bias, call.result)
    if found is None:
        return _cost(tracer, total)
    if tracer.owner(tracer.parameter(weight).source) is not None:  # type: ignore[union-attr]
        tracer.constraints.counts_channels(tracer.modules[-1], "in_features", found[0])
        tracer.constraints.counts_channels(tracer.modules[-1], "out_features", found[1])
    return _cost(tracer, total, *found)


def _across(tracer: Tracer, tensor: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor, total: int) -> None:
    """Follow a linear layer along another dimension than the channels (over tokens): it treats them separately."""
    value = tracer.activation(tensor)
    assert value is not None
    reason = "it mixes another dimension than the one whose channels can shrink"
    tracer.keep_all([weight, bias], reason)
    nodes = value.nodes
    if bias is not None:
        nodes = torch.tensor([tracer.constraints.pass_on(n, False) for n in nodes.reshape(-1).tolist()]).view(
            nodes.shape
        )
    tracer.set(result, nodes)
    if len(value.varies()) == 1:
        _cost(tracer, total, [when_carried(node) for node in nodes.reshape(-1).tolist()])
    else:
        tracer.keep_all([tensor], reason)
        _cost(tracer, total)


@register_rule("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose1d", "conv_transpose2d")
@register_rule("conv_transpose3d")
def convolution(tracer: Tracer, call: Call) -> None:
    """Plain, grouped, depthwise and transposed convolutions."""
    tensor, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    transposed = "transpose" in call.name or bool(call.arguments.get("transposed"))
    spatial = weight.dim() - 2
    dim = tensor.dim() - spatial - 1
    pixels = (tensor if transposed else call.result).shape[dim + 1 :].numel()
    total = tensor.shape[:dim].numel() * pixels * weight.numel()
    ins, outs = tensor.shape[dim], call.result.shape[dim]
    value = tracer.parameter(weight)
    module = tracer.modules[-1] if tracer.modules[-1] in tracer.native else None
    constraints = tracer.constraints

    def attributes(inputs: Sequence[Presence], outputs: Sequence[Presence], kernels: Sequence[Presence] = ()) -> None:
        if module is not None:
            constraints.counts_channels(module, "in_channels", inputs)
            constraints.counts_channels(module, "out_channels", outputs)
            if kernels:
                constraints.counts_channels(module, "groups", kernels)
        elif kernels and value is not None:
            count_groups(tracer, [presence // 2 for presence in kernels], argument_as_written(call, "groups", 6))

    if groups == 1:
        found = mix(tracer, tensor, dim, weight, (1, 0) if transposed else (0, 1), bias, call.result)
        if found is not None:
            attributes(*found)
        return _cost(tracer, total, *(found or ()))
    if groups == ins and not transposed and not (value is not None and tracer.value(tensor) is None):
        sources = [out // (outs // ins) for out in range(outs)]
        depthwise = per_channel_layer(tracer, tensor, call.result, dim, [weight, bias], sources)
        if depthwise is not None:
            attributes(depthwise[0], depthwise[1], depthwise[0])
        return _cost(tracer, total, *((depthwise[0],) if depthwise else ()))
    follow = _grouped_transposed if transposed else _grouped
    kernels = follow(tracer, tensor, dim, weight, bias, call.result, groups)
    if kernels is None:
        return _cost(tracer, total)
    inputs, outputs = kernels
    attributes(inputs, outputs, inputs[:: ins // groups])
    return _cost(tracer, total, inputs[:: ins // groups])


def _grouped(
    tracer: Tracer, tensor: Tensor, dim: int, weight: Tensor, bias: Tensor | None, result: Tensor, groups: int
) -> tuple[list[Presence], list[Presence]] | None:
    """Follow a grouped convolution: all inputs and outputs of a kernel group are removed together."""
    value, bias_value, nodes = tracer.parameter(weight), tracer.parameter(bias), tracer.channels(tensor, dim)
    module = tracer.boundary(value.source) if value is not None else None
    computed = bias is not None and bias_value is None
    partial = value is not None and tracer.full_sizes[value.source or ""] != weight.shape
    if value is None or value.source is None or nodes is None or computed or partial:
        _unfollowed_groups(tracer, tensor, weight, bias)
        return None
    constraints, ins, outs = tracer.constraints, len(nodes), result.shape[dim]
    layer, when = module or tracer.owner(value.source) or value.source, when_carried if module is None else when_live
    outputs = constraints.write(value.source, 0, outs, range(outs), layer, exact=module is None)
    reading = [when(node) if node > ZERO else CONSTANT for node in nodes]
    writing = [when_live(node) for node in outputs]
    for g in range(groups):
        mine = slice(g * ins // groups, (g + 1) * ins // groups)
        theirs = slice(g * outs // groups, (g + 1) * outs // groups)
        constraints.together.append((*reading[mine], *map(when_carried, nodes[mine]), *writing[theirs]))
    if bias_value is not None and bias_value.source is not None:
        constraints.follow(bias_value.source, 0, range(outs), writing)
    if module is not None:
        constraints.port(constraints.reads, module, dim - tensor.dim(), nodes)
        constraints.port(constraints.writes, module, dim - tensor.dim(), outputs)
    tracer.set_channels(result, dim, outputs)
    return reading, writing


def _unfollowed_groups(tracer: Tracer, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    reason = "a grouped convolution that is not followed"
    tracer.keep_all([tensor, weight, bias], reason)
    tracer.constraints.unfollowed.setdefault(tracer.modules[-1], reason)


def _grouped_transposed(
    tracer: Tracer, tensor: Tensor, dim: int, weight: Tensor, bias: Tensor | None, result: Tensor, groups: int
) -> tuple[list[Presence], list[Presence]] | None:
    """Follow a grouped transposed convolution, whose weight has an entry per input: as a depthwise one, by groups."""
    value, bias_value, nodes = tracer.parameter(weight), tracer.parameter(bias), tracer.channels(tensor, dim)
    module = tracer.boundary(value.source) if value is not None else None
    if module is None or value is None or value.source is None or nodes is None or nodes == [CONSTANT] * len(nodes):
        _unfollowed_groups(tracer, tensor, weight, bias)
        return None
    constraints, ins, outs = tracer.constraints, len(nodes), result.shape[dim]
    sources = [out * groups // outs * (ins // groups) for out in range(outs)]
    outputs = [constraints.layer_output(module, out, nodes[i]) for out, i in enumerate(sources)]
    reading, writing = [when_live(node) for node in nodes], [when_live(nodes[i]) for i in sources]
    for first in range(0, ins, ins // groups):
        mine = slice(first, first + ins // groups)
        constraints.together.append((*reading[mine], *map(when_carried, nodes[mine])))
    constraints.follow(value.source, 0, range(ins), reading)
    if bias_value is not None and bias_value.source is not None:
        constraints.follow(bias_value.source, 0, range(outs), writing)
    constraints.port(constraints.reads, module, dim - tensor.dim(), nodes)
    constraints.port(constraints.writes, module, dim - tensor.dim(), outputs)
    tracer.set_channels(result, dim, outputs)
    return reading, writing


@register_rule("embedding")
def embedding(tracer: Tracer, call: Call) -> None:
    """Embeddings, whose columns are the channels that they write."""
    value = tracer.parameter(call["weight"])
    axis = _axis(value, 1) if value is not None else None
    if value is None or value.source is None or axis is None:
        return tracer.keep_all([call["weight"], call["indices"]], "an embedding that is not followed")
    module = tracer.boundary(value.source)
    dim, indices = axis
    size = tracer.full_sizes[value.source][dim]
    layer = tracer.owner(value.source) or value.source
    outputs = tracer.constraints.write(value.source, dim, size, indices, layer, exact=module is None)
    if module is not None:
        tracer.constraints.port(tracer.constraints.writes, module, -1, outputs)
        tracer.constraints.counts_channels(module, "embedding_dim", [when_live(node) for node in outputs])
    tracer.set_channels(call.result, call.result.dim() - 1, outputs)
    return None


@register_rule("bmm", "baddbmm")
def batched_product(tracer: Tracer, call: Call) -> None:
    """Products of batches of matrices, one of which may be a parameter."""
    operands = ("batch1", "batch2") if call.name == "baddbmm" else ("self", "mat2")
    first, second = call[operands[0]], call[operands[1]]
    total = first.numel() * second.shape[-1]
    if call.name == "bmm" and (tracer.parameter(first) is None) != (tracer.parameter(second) is None):
        if tracer.parameter(second) is not None:  # one matrix (`einsum` decomposes into that), or one per expert
            found = mix(tracer, first, 2, second, (2, 1), None, call.result)
        else:
            found = mix(tracer, second, 1, first, (1, 2), None, call.result)
        return _cost(tracer, total, *(found or ()))
    if tracer.parameter(first) is not None or tracer.parameter(second) is not None:
        tracer.keep_all([call["self"], first, second], "a product that is not followed")
        return _cost(tracer, total)
    if call.name == "baddbmm":
        return _added_product(tracer, call["self"], first, second, total)
    return _product(tracer, first, second, call.result, total)


def _added_product(tracer: Tracer, added: Tensor, first: Tensor, second: Tensor, total: int) -> None:
    """Follow scores to which a constant is added for every head: heads are kept, their features are tied."""
    left, right = _fields(tracer, first, second)
    alike = left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1]
    if tracer.value(added) is not None or not alike or left.shape[1] > 1 or right.shape[2] > 1:
        tracer.keep_all([added, first, second], "a product that is not followed")
        return _cost(tracer, total)
    meet = _contracted(tracer, left, right.transpose(1, 2))
    for nodes in (left, right):
        _same_heads(tracer, nodes)
    return _cost(tracer, total, [when_carried(node) for node in meet.reshape(-1).tolist()])


def _same_heads(tracer: Tracer, nodes: Tensor) -> None:
    """Let no batch entry (a head) of a product be removed."""
    reason = "heads are multiplied or added to a tensor of fixed size"
    tracer.constraints.layouts.append(Layout(nodes, (None,) * 3, frozenset({0}), reason))


def _fields(tracer: Tracer, first: Tensor, second: Tensor) -> list[Tensor]:
    """The nodes of two batches of matrices, with three dimensions; constants for tensors that are not followed."""
    fields = []
    for value in map(tracer.activation, (first, second)):
        nodes = torch.zeros((1, 1, 1), dtype=torch.int64) if value is None else value.nodes
        fields.append(nodes.view((1,) * (3 - nodes.dim()) + nodes.shape))
    return fields


@register_rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_product(tracer: Tracer, call: Call) -> None:
    """A layer with several weights, each for some rows: hidden features go from all experts, eight at a time.

    Rows of what it multiplies must be multiples of 16 bytes, which is eight channels in two bytes.
    """
    first, second = ("self", "mat2") if "mat2" in call.arguments else ("input", "weight")
    tensor, weight = call[first], call[second]
    found = mix(tracer, tensor, 1, weight, (2, 1), call.arguments.get("bias"), call.result)
    for presences in found or ():
        tracer.constraints.together += [tuple(presences[i : i + 8]) for i in range(0, len(presences), 8)]
    return _cost(tracer, tensor.shape[0] * weight.shape[1] * weight.shape[2], *(found or ()))


def _product(tracer: Tracer, first: Tensor, second: Tensor, result: Tensor, total: int) -> None:
    """Follow (b, m, k) times (b, k, n), both activations: channels that are multiplied are tied.

    Only one dimension of each may have channels: b (heads), k (zero is neutral in the sum over it), or one of m and n.
    With heads all may have some, because a head is removed as a whole (attention over channels).
    """
    left, right = _fields(tracer, first, second)
    fixed = "it is multiplied by a tensor of fixed size"
    if right.shape[1] == right.numel() > 1 == left.shape[2]:  # the sum runs over it, but over no channels of the other
        tracer.keep_all([second], fixed)
        right = torch.zeros_like(right[:, :1])
    elif left.shape[2] == left.numel() > 1 == right.shape[1]:
        tracer.keep_all([first], fixed)
        left = torch.zeros_like(left[:, :, :1])
    sizes = {"b": (left.shape[0], right.shape[0]), "k": (left.shape[2], right.shape[1])}
    rows, columns = left.shape[1] > 1, right.shape[2] > 1
    unmatched = any((a > 1) != (b > 1) for a, b in sizes.values())
    if left.shape[0] > 1 and right.shape[0] > 1 and ((rows and columns) or unmatched):
        heads = pairwise(left[:, :1, :1], right[:, :1, :1], tracer.constraints.multiplied)
        _whole_heads(tracer, left)
        _whole_heads(tracer, right)
        tracer.set(result, heads.view(heads.shape[3 - result.dim() :]))
        return _cost(tracer, total, [when_carried(node) for node in heads.reshape(-1).tolist()])
    if tracer.activation(first) is None and right.shape[0] > 1 == right.shape[1]:  # fixed scores, values of all heads
        _same_heads(tracer, right)
        tracer.set(result, right)
        return _cost(tracer, total, [when_carried(node) for node in right.reshape(-1).tolist()])
    if (rows and columns) or unmatched or (sizes["k"][0] > 1 and (rows or columns)):
        tracer.keep_all([first, second], "it is multiplied in a way that is not followed")
        return _cost(tracer, total)
    if left.shape[0] == left.shape[2] == 1 and (rows or columns):
        tracer.keep_all([second if rows else first], "it is combined with every channel of another tensor")
        nodes = left if rows else right
        tracer.set(result, nodes.view(nodes.shape[3 - result.dim() :]))
        return _cost(tracer, total, [when_carried(node) for node in nodes.reshape(-1).tolist()])
    meet = _contracted(tracer, left[:, :1, :], right[:, :, :1].transpose(1, 2))
    _whole_heads(tracer, left)
    _whole_heads(tracer, right)
    batch = meet[:, :, :1]
    if left.shape[0] > 1 and (rows or columns):
        pairwise(batch, left if rows else right, tracer.constraints.multiplied)
    nodes = left[:, :, :1] if rows else right[:, :1, :] if columns else batch
    if nodes.numel() > 1 or sizes["k"][0] == 1:
        tracer.set(result, nodes.view(nodes.shape[3 - result.dim() :]))
    factors = []
    if left.shape[0] > 1:
        factors.append([when_carried(node) for node in batch.reshape(-1).tolist()])
    elif sizes["k"][0] > 1:
        factors.append([when_carried(node) for node in meet.reshape(-1).tolist()])
    return _cost(tracer, total, *factors)


def _contracted(tracer: Tracer, left: Tensor, right: Tensor) -> Tensor:
    """The nodes of the products (b, 1, k) over which a matrix product sums; where neither factor is zero, all count."""
    constraints = tracer.constraints
    if left.shape[0] == right.shape[0] == 1 < left.shape[2]:  # not of heads, which go as a whole, with their products
        pairs = zip(left.flatten().tolist(), right.expand(left.shape).flatten().tolist(), strict=True)
        both = [node for pair in pairs if constraints.nonzero.issuperset(pair) for node in pair]
        constraints.keep_all(both, "a product sums over it, where a channel that is dropped need not be zero")
    return pairwise(left, right, constraints.multiplied)


def _whole_heads(tracer: Tracer, nodes: Tensor) -> None:
    """Let the channels of one batch entry (a head) of a product be one unit."""
    if nodes.shape[0] > 1 and nodes.numel() > nodes.shape[0]:
        rigid = frozenset(d for d in (1, 2) if nodes.shape[d] > 1)
        tracer.constraints.layouts.append(Layout(nodes, (None,) * 3, rigid, "a head is multiplied as a whole"))


@register_rule("mkldnn_rnn_layer", "_cudnn_rnn")
def recurrent(tracer: Tracer, call: Call) -> None:
    """Recurrent layers in one operation, of which nothing can shrink; with others they are sums of matrix products."""
    weights = call.arguments.get("weight") or [call["weight0"], call["weight1"]]
    tracer.keep_all([call["input"], *weights], "it enters a recurrent layer")
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    _cost(tracer, call["input"].shape[:-1].numel() * matrices)


@register_rule("scaled_dot_product_attention")
def attention(tracer: Tracer, call: Call) -> None:
    """Attention, from which whole heads are removed: query heads together with their key and value heads.

    One head of keys and values that all heads share is kept. With a single head of queries, single channels can go.
    """
    query, key, value = call["query"], call["key"], call["value"]
    total = query.numel() * key.shape[-2] + query.shape[:-1].numel() * value.shape[-2] * value.shape[-1]
    fields = [tracer.activation(t) for t in (query, key, value)]
    mask = call.arguments.get("attn_mask")
    if all(f is None for f in fields):
        return _cost(tracer, total)
    leading = {d for field in fields if field is not None for d in field.varies() if d < query.dim() - 2}
    heads = leading.pop() if len(leading) == 1 else query.dim() - 3  # other dimensions are windows
    usable = query.dim() >= 3 and all(f is not None and f.nodes.shape[-2] == 1 for f in fields)
    rows = []
    for field, tensor in zip(fields, (query, key, value), strict=True):
        if field is None or not usable or any(d not in (heads, query.dim() - 1) for d in field.varies()):
            usable = False
            break
        nodes = field.nodes.movedim(heads, 0)
        rows.append(nodes.reshape(len(nodes), -1).expand(tensor.shape[heads], -1))
    if usable and all(field is not None and field.varies() == [query.dim() - 1] for field in fields):
        return _one_head(tracer, call, rows)
    biases = _head_biases(tracer, mask, rows[0], heads - query.dim()) if usable else None
    if biases is None:
        tracer.keep_all([query, key, value, mask], "attention over channels that are not heads")
        return _cost(tracer, total)
    if len(rows[1]) == len(rows[2]) == 1 < len(rows[0]):
        tracer.keep_all([key, value], "all heads share it")
        rows[1:] = rows[0], changed(tracer, rows[0][:, :1])
    repeats = rows[0].shape[0] // rows[1].shape[0]
    for head in range(rows[1].shape[0]):
        mine = slice(head * repeats, (head + 1) * repeats)
        group = [rows[0][mine], rows[1][head], rows[2][head], torch.tensor(biases[mine], dtype=torch.int64)]
        members = sorted({node for nodes in group for node in nodes.reshape(-1).tolist()})
        tracer.constraints.together.append(tuple(map(when_carried, members)))
    shape = [1] * call.result.dim()
    shape[heads], shape[-1] = call.result.shape[heads], rows[2].shape[1]
    tracer.set(call.result, rows[2].repeat_interleave(repeats, 0).view(shape))
    return _cost(tracer, total, [when_carried(node) for node in rows[0][:, 0].tolist()])


def _one_head(tracer: Tracer, call: Call, rows: list[Tensor]) -> None:
    """Follow attention with a single head: channels of queries go with those of keys, channels of values alone.

    Args:
        rows: nodes of queries, keys and values; all rows of each are the same.
    """
    query, key, value, mask = call["query"], call["key"], call["value"], call.arguments.get("attn_mask")
    if (bias := tracer.activation(mask)) is not None and bias.varies():
        return tracer.keep_all([query, key, value, mask], "attention over channels that are not heads")
    tracer.keep_all([mask], "it is the same for all channels")
    if call["scale"] is None and tracer.shrinks_over(query, query.dim() - 1) is None:
        tracer.keep_all([query, key], "the scale of attention is that of all channels")
    meet = pairwise(rows[0][0], rows[1][0], tracer.constraints.multiplied)
    tracer.set_channels(call.result, call.result.dim() - 1, rows[2][0].tolist())
    _cost(tracer, query.numel() * key.shape[-2], [when_carried(node) for node in meet.tolist()])
    outputs = [when_carried(node) for node in rows[2][0].tolist()]
    return _cost(tracer, query.shape[:-1].numel() * value.shape[-2] * value.shape[-1], outputs)


def _head_biases(tracer: Tracer, mask: Tensor | None, queries: Tensor, dim: int) -> list[int] | None:
    """The nodes of a mask or bias of attention, one per head, none where it is the same for all heads.

    Args:
        queries: nodes of the queries, one row per head.
        dim: the dimension of heads, counted from the end.

    Returns:
        None if the mask is not followed. Channels of a parameter are followed here.
    """
    value = tracer.value(mask)
    if mask is None:
        return []
    if mask.dim() < -dim or mask.shape[dim] == 1:  # the same for all heads
        if value is not None and value.source is None and value.varies():
            return None
        tracer.keep_all([mask], "it is the same for all heads")
        return []
    if value is None:
        return None
    if value.source is None:
        return tracer.channels(mask, dim)
    along = along_dimension(value, mask.dim() + dim, mask.dim())
    if along is None:
        return None
    tracer.constraints.follow(value.source, *along, [when_carried(node) for node in queries[:, 0].tolist()])
    return []

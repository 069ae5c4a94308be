"""`nn.MultiheadAttention` in single operations, which a trace can follow.

PyTorch's function is one call for a trace, and its sizes are plain numbers. In what is traced, the same is computed by
linear layers, views and attention, with sizes that remember where they come from. Heads go together with the channels
of the input, because the layer requires that all heads together are as wide as its input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart.graph.sizes import plain
from slimstart.graph.tracer import Tracer


def follow_heads(tracer: Tracer, name: str, module: nn.MultiheadAttention) -> None:
    """Let a copy of a layer compute by single operations from now on, where it is of the common form."""
    common = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    common = common and plain(module.num_heads) > 1  # its only head cannot go, and its scale is that of all channels
    if type(module).forward is not nn.MultiheadAttention.forward or not common:
        return
    for attribute in ("embed_dim", "num_heads"):
        setattr(module, attribute, tracer.size_of_attribute(name, attribute, getattr(module, attribute)))
    module.forward = partial(_attend, tracer, module)  # type: ignore[method-assign]


def _attend(
    tracer: Tracer,
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the layer computes, without dropout; the weights that it returns are of the right shape only."""
    if query.dim() == 2:  # without a batch
        added = [t.unsqueeze(0 if layer.batch_first else 1) for t in (query, key, value)]
        padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        query, key, value = added
        y, scores = _attend(tracer, layer, query, key, value, padding, need_weights, attn_mask, average_attn_weights)
        return y.squeeze(0 if layer.batch_first else 1), scores if scores is None else scores.squeeze(0)
    query, key, value = (t if layer.batch_first else t.transpose(0, 1) for t in (query, key, value))
    batch, length, width = query.shape
    weights = layer.in_proj_weight.chunk(3)
    bias: Tensor | None = layer.in_proj_bias
    biases: Any = (None,) * 3 if bias is None else bias.chunk(3)
    q, k, v = (
        F.linear(t, weight, own).view(batch, t.shape[1], layer.num_heads, width // layer.num_heads).transpose(1, 2)
        for t, weight, own in zip((query, key, value), weights, biases, strict=True)
    )
    mask = _float_mask(attn_mask, query.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.view(batch, -1, *mask.shape[1:])
    if key_padding_mask is not None:
        padding = _float_mask(key_padding_mask, query.dtype)[:, None, None, :]  # type: ignore[index]
        mask = padding if mask is None else mask + padding
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y = y.transpose(1, 2).reshape(batch, length, layer.embed_dim)
    y = F.linear(y, layer.out_proj.weight, layer.out_proj.bias)
    y = y if layer.batch_first else y.transpose(0, 1)
    if not need_weights:
        return y, None
    shape = (batch, *(() if average_attn_weights else (plain(layer.num_heads),)), length, k.shape[-2])
    returned = torch.full(tuple(map(plain, shape)), 1.0 / k.shape[-2], dtype=query.dtype, device=query.device)
    tracer.averages[returned] = tracer.activation(q)
    return y, returned


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask that is added; in that of the layer, True is what is left out."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))

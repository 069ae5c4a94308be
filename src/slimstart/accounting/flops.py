"""FLOPs of one forward, counted by PyTorch's own counter on the operations that really run.

Convention: **one multiply-add = 1** (PyTorch's counter says 2). Counted are convolutions, matrix products and
attention; normalisation, activations and additions are not, as in the literature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from slimstart.inputs import as_call


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Attention on the CPU, which PyTorch's counter does not know: two products per head."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[-2] * (width + value[-1]))


def flops(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-adds of one forward in evaluation mode; the model is left as it was.

    Args:
        model: any module, dense or narrow.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
    """
    args, kwargs = as_call(example_inputs)
    counter = FlopCounterMode(
        display=False,
        custom_mapping={torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention},
    )
    modes = {module: module.training for module in model.modules()}
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one fused operation, which no counter knows
    model.eval()
    try:
        with torch.no_grad(), counter:
            model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, training in modes.items():
            module.training = training
    return counter.get_total_flops() // 2

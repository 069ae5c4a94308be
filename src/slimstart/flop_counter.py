"""FLOPs of the operations that run, counted by PyTorch's `FlopCounterMode`.

Convention: **one multiply-add = 1** (PyTorch counts 2). Convolutions, matrix products and attention are counted;
normalisation, activations and additions are not, as in the literature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from slimstart.devices import evaluating, without_gradients
from slimstart.inputs import as_call


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Attention on the CPU, which PyTorch's counter does not count: two products per head."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[-2] * (width + value[-1]))


def _grouped_product(rows: Any, weights: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Rows times the weight of their group (experts), and its gradients, which PyTorch's counter does not count."""
    each = rows[1:] if len(rows) > len(weights) else rows  # the columns of `weights` are in groups, then
    return int(2 * math.prod(each) * weights[-1])


def _recurrent(inputs: Any, weights: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Recurrent layers in one operation, which PyTorch's counter does not count: each matrix times every step."""
    several = weights if isinstance(weights[0], torch.Size | tuple | list) else (weights, args[0])
    return int(2 * math.prod(inputs[:-1]) * sum(math.prod(shape) for shape in several if len(shape) == 2))


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(*args, **kwargs)


class Count:
    """The multiply-adds that have run within `counting` so far."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter

    @property
    def total(self) -> int:
        return self._counter.get_total_flops() // 2

    def of_module(self, path: str) -> int:
        """Multiply-adds of one module, named from the class of the network on, as in "VGG.features.0"."""
        return sum(self._counter.get_flop_counts().get(path, {}).values()) // 2


@contextmanager
def counting() -> Iterator[Count]:
    """Count the multiply-adds that run within this context, those of backward passes included."""
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            torch.ops.aten._grouped_mm: _grouped_product,
            torch.ops.aten.mkldnn_rnn_layer: _recurrent,
            torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward,
            torch.ops.aten._cudnn_rnn: _recurrent,
            torch.ops.aten._cudnn_rnn_backward: _recurrent_backward,
        },
    )
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused operation that is not counted
    try:
        with counter:
            yield Count(counter)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def flops(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-adds of one forward in evaluation mode; the model is not changed.

    Args:
        model: any module, dense or narrow.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
    """
    args, kwargs = as_call(example_inputs)
    with evaluating(model), without_gradients(model), counting() as count:
        model(*args, **kwargs)
    return count.total

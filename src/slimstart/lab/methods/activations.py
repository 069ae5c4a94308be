r"""Inputs of layers that mix channels: every call of a layer as a product of its weight and patches of its input.

A linear layer, or a convolution, computes for every filter i and at every position p of its output

.. math:: y_{pi} = \mathrm{bias}_i + \sum_c \langle w_{ic}, a_{pc} \rangle,

where :math:`a_{pc}` is what the kernel's taps cover of channel c. A unit owns one channel or several of them (after a
flatten each of its pixels is one); its *contribution* is their part of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from slimstart.graph import ChannelGraph
from slimstart.graph.readers import Reader, readers
from slimstart.inputs import as_batch


@dataclass(frozen=True, eq=False)
class Reading:
    """One call of a layer.

    Attributes:
        weight: (filters, channels, taps), at least in single precision.
        units: (channels,) int64 on the CPU, whose channel it is; -1: always there.
        windows: a view of the input, of shape (*positions, channels, *taps); the first of the positions counts images.
        num_dims: how many dimensions `positions` has.
    """

    weight: Tensor
    units: Tensor
    windows: Tensor
    num_dims: int

    @property
    def num_positions(self) -> int:
        return self.windows.shape[: self.num_dims].numel()

    @property
    def positions_per_image(self) -> int:
        return self.windows.shape[1 : self.num_dims].numel()

    def patches(self, positions: Tensor) -> Tensor:
        """(len(positions), channels, taps): what the kernel covers at these of the `num_positions` positions."""
        index = torch.unravel_index(positions, self.windows.shape[: self.num_dims])
        return self.windows[index].flatten(2).to(self.weight.dtype)


def observable(graph: ChannelGraph, model: nn.Module) -> list[Reader]:
    """The readers that are supported: linear layers and plain convolutions that use their weight unchanged.

    (The kernel groups of a grouped convolution go with their units; it mixes nothing.)
    """
    modules = dict(model.named_modules())

    def is_understood(reader: Reader) -> bool:
        layer = modules[reader.layer]
        understood = isinstance(layer, _ConvNd | nn.Linear) and not isinstance(layer, _ConvTransposeNd)
        return understood and getattr(layer, "groups", 1) == 1 and reader.weight == f"{reader.layer}.weight"

    return [reader for reader in readers(graph, model) if is_understood(reader)]


@torch.no_grad()
def observe(
    model: nn.Module,
    layers: Sequence[Reader],
    batches: Iterable[tuple[Any, ...]],
    loss_fn: Callable[..., Any],
    look: Callable[[Reader, Reading], None],
) -> None:
    """Run batches through a model in evaluation mode, and observe every call of some of its layers.

    Args:
        model: left in evaluation mode, so give a copy.
        layers: some of the layers that `observable` returned.
        loss_fn: called as `loss_fn(model, *batch)`; its value is not used.
    """
    model.eval()

    def seen(reader: Reader, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        with torch.autocast(output.device.type, enabled=False):  # the forward's own is not meant for this
            look(reader, _reading(layer, args[0] if args else kwargs["input"], reader.units))

    with ExitStack() as hooks:
        for reader in layers:
            layer = model.get_submodule(reader.layer)
            hooks.enter_context(layer.register_forward_hook(partial(seen, reader), with_kwargs=True))
        for batch in batches:
            loss_fn(model, *as_batch(batch))


def _reading(module: nn.Module, x: Tensor, units: Tensor) -> Reading:
    weight: Tensor = module.weight  # type: ignore[assignment]
    weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if not isinstance(module, _ConvNd):
        return Reading(weight.unsqueeze(2), units, x.reshape(-1, x.shape[-1], 1), 1)
    num_dims = len(module.kernel_size)
    x = x if x.dim() == num_dims + 2 else x.unsqueeze(0)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode)
    steps = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (size, stride, dilation) in enumerate(steps):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return Reading(weight.flatten(2), units, x.movedim(1, num_dims + 1), num_dims + 1)

r"""What a training costs: the formula of the paper's appendix, and a ledger of what was executed.

**The formula.** With :math:`f_D` FLOPs of a dense forward and :math:`f_S` of a sparse one, and a backward counted as
two forwards of the network that it goes through, one image costs :math:`3 f_D` in dense training, :math:`4 f_S` in
Algorithm 1 with its second forward, and :math:`f_S + 2 f_D` where only the forward is sparse (GrowEfficient). The
saving is :math:`3 f_D` divided by that.

**The ledger** counts what runs: the second forward only on the steps that have one, no gradient of the images, which is
not computed, and the forwards that choose a mask and measure statistics. Validation does not count as training, for any
method. One multiply-add = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slimstart.devices import evaluating, without_gradients
from slimstart.flop_counter import counting
from slimstart.inputs import as_call


def formula_flops(forward: float, backward: float) -> float:
    """FLOPs of one image in one step, by the paper's appendix.

    Args:
        forward: FLOPs of all forwards together.
        backward: FLOPs of a forward through the network that the backward goes through.
    """
    return forward + 2 * backward


@dataclass
class Ledger:
    """FLOPs executed in training, by kind."""

    forward: int = 0  # of the trained network
    backward: int = 0
    reference: int = 0  # second forwards
    selection: int = 0  # forwards that choose a mask or measure statistics

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.reference + self.selection

    def step(self, num_images: int, forward: int, input_gradient: int, reference: int = 0) -> None:
        """Enter one training step.

        Args:
            forward: FLOPs of one image through the trained network.
            input_gradient: FLOPs that its backward saves, because the images need no gradient.
            reference: FLOPs of one image through all reference networks together.
        """
        self.forward += num_images * forward
        self.backward += num_images * (2 * forward - input_gradient)
        self.reference += num_images * reference


@dataclass(frozen=True)
class FirstLayers:
    """Layers that read the network's inputs: their backward has one product less.

    Attributes:
        per_filter: FLOPs of one forward, per filter, of every such layer.
        filters: the number of filters of each in the dense network.
    """

    per_filter: Mapping[str, int]
    filters: Mapping[str, int]

    def input_gradient(self, kept: Mapping[str, int] | None = None) -> int:
        """FLOPs that a backward saves with this number of filters in each layer; None for all filters."""
        kept = self.filters if kept is None else kept
        return sum(flops * kept[name] for name, flops in self.per_filter.items())


def first_layers(model: nn.Module, example_inputs: Any) -> FirstLayers:
    """Find the convolutions and linear layers whose input carries no gradient, by a look at one forward."""
    args, kwargs = as_call(example_inputs)
    filters: dict[str, int] = {}

    def look(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and not inputs[0].requires_grad:
            filters[name] = _num_filters(layer)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if _num_filters(module):
                hooks.enter_context(module.register_forward_pre_hook(partial(look, name)))
        with evaluating(model), torch.enable_grad(), counting() as count:
            model(*args, **kwargs)
    per_filter = {name: count.of_module(f"{type(model).__name__}.{name}") // n for name, n in filters.items()}
    return FirstLayers(per_filter, filters)


def layer_flops(model: nn.Module, example_inputs: Any) -> dict[str, int]:
    """FLOPs of one forward of every convolution and linear layer."""
    args, kwargs = as_call(example_inputs)
    with evaluating(model), without_gradients(model), counting() as count:
        model(*args, **kwargs)
    layers = [name for name, module in model.named_modules() if name and _num_filters(module)]
    return {name: count.of_module(f"{type(model).__name__}.{name}") for name in layers}


def _num_filters(layer: nn.Module) -> int:
    """Output channels of a convolution or a linear layer; 0 for anything else, blocks with such an attribute too."""
    if any(name != "parametrizations" for name, _ in layer.named_children()):
        return 0
    return int(getattr(layer, "out_channels", 0) or getattr(layer, "out_features", 0))

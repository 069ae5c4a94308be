r"""A dense network with gates, for methods that learn a structure by the chain rule.

A gate multiplies a unit wherever channels are mixed, that is, the columns of all weights that read it,

.. math:: y = \sum_c w_{:,c} \, g_c \, x_c,

so it acts after the normalisation, which would cancel a factor before it. With gates of 0 and 1 this is the masked
dense network. Every gate has a gradient, also at 0, so the network is never narrow while gates are learned.

`make_gates` has the kinds of gates by name: relaxations, which take the place of a policy on narrow networks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from slimstart.devices import device_of
from slimstart.errors import TraceError
from slimstart.graph import ChannelGraph
from slimstart.graph.readers import Reader, readers
from slimstart.inputs import as_call
from slimstart.lab.methods.gates import Gates
from slimstart.lab.methods.grow_efficient import GrowEfficientGates
from slimstart.lab.methods.sampled_gates import BernoulliGates, GumbelGates, HardConcreteGates
from slimstart.lab.methods.thresholded_gates import SigmoidGates, SoftThresholdGates
from slimstart.narrow.compact import masked, tensor_places
from slimstart.policies import Budget

_GATES: dict[str, type[Gates]] = {
    "ste": BernoulliGates,
    "sigmoid_ste": SigmoidGates,
    "gumbel": GumbelGates,
    "hard_concrete": HardConcreteGates,
    "soft_threshold": SoftThresholdGates,
    "grow_efficient": GrowEfficientGates,
}
RELAXATIONS = tuple(name for name in _GATES if name != "grow_efficient")
"""Names that `estimator` of a recipe may have; GrowEfficient is a method of its own."""

# In float64, where two orders of the same operations differ by about 1e-15.
TOLERANCE = 1e-8


def make_gates(
    name: str, model: nn.Module, graph: ChannelGraph, budget: Budget, lr: float | None, total_steps: int, seed: int
) -> Gates:
    """The gates of a relaxation, or "grow_efficient"; the other arguments are those of `Gates`."""
    if graph.num_units == 0:
        raise TraceError("no channel of this network can go, so there is nothing to gate; print the graph to see why")
    return _GATES[name](model, graph, budget, lr, total_steps, seed)


class Gated(nn.Module):
    """A dense model whose units are multiplied by gates. It has the parameters and the forward of the model.

    Args:
        model: the model that was traced.
        graph: its channel graph, with coupling "stream".
        gates: called once per forward; returns (num_units,) gates on the model's device.

    Raises:
        TraceError: no layer reads a unit through a weight, so a gate has no effect; the message names the layer.
    """

    _units: Tensor

    def __init__(self, model: nn.Module, graph: ChannelGraph, gates: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.gates = model, gates
        found = gated_readers(graph, model)
        parameters = dict(model.named_parameters())
        places = tensor_places(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        self._sizes = [reader.units.numel() for reader in found]
        # Of every weight: itself, the shape in which its gates multiply it, and its names. A module that is reached
        # by two paths gets the gated weight once: `functional_call` would take the first one for the weight itself.
        self._weights: list[tuple[nn.Parameter, list[int], list[str]]] = []
        for reader in found:
            owners = {(id(modules[path]), key): f"{path}.{key}" if path else key for path, key in places[reader.weight]}
            weight = parameters[reader.weight]
            self._weights.append((weight, _along(weight, reader.dim), list(owners.values())))
        units = torch.cat([torch.zeros(0, dtype=torch.int64), *(reader.units for reader in found)])
        units = torch.where(units < 0, graph.num_units, units)
        self.register_buffer("_units", units.to(device_of(model)), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        gates = self.gates()
        columns = torch.cat([gates, gates.new_ones(1)])[self._units].split(self._sizes)  # the last: always there
        weights = {
            name: gated
            for (weight, shape, names), gate in zip(self._weights, columns, strict=True)
            for gated in (weight * gate.view(shape).to(weight.dtype),)
            for name in names
        }
        return functional_call(self.model, weights, args, kwargs, tie_weights=False)


@torch.no_grad()
def fold_(model: nn.Module, graph: ChannelGraph, gates: Tensor) -> nn.Module:
    """Multiply gates into the weights, in place: the model then computes the same without them.

    Args:
        gates: (num_units,), on any device.
    """
    parameters = dict(model.named_parameters())
    gates = torch.cat([gates.cpu(), gates.new_ones(1, device="cpu")])
    for reader in gated_readers(graph, model):
        weight = parameters[reader.weight]
        weight.mul_(gates[reader.units].view(_along(weight, reader.dim)).to(weight))
    return model


def gated_readers(graph: ChannelGraph, model: nn.Module) -> list[Reader]:
    """The weights that gates multiply; `TraceError` where a unit has none."""
    found = readers(graph, model)
    read = torch.zeros(graph.num_units + 1, dtype=torch.bool)
    for reader in found:
        read[reader.units] = True  # -1, always there, is the last
    for group in graph.groups:
        if not bool(read[group.units.start : group.units.stop].all()):
            raise TraceError(
                f"{group.name!r} writes channels that no convolution and no linear layer reads, so a gate cannot act "
                "on them. Use a method that slices (`slimstart`), or name the layer in `keep` of `trace`"
            )
    return found


def verify_gating(model: nn.Module, graph: ChannelGraph, example_inputs: Any, seed: int = 0) -> None:
    """Check on an example that gates of 0 and 1 give the masked dense network, in evaluation mode and float64.

    Channels may also be mixed without a weight (a product of two activations), which no list of readers shows.

    Raises:
        TraceError: they do not.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_like(tensor: Tensor) -> Tensor:
        """An example of zeros, or a fresh normalisation, may hide what gates do; whole numbers may be indices."""
        if not tensor.is_floating_point():
            return tensor
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64).add_(0.5).to(tensor.device)

    selection = graph.select(torch.rand(graph.num_units, generator=generator) < 0.5)
    twin = copy.deepcopy(model).double().eval()
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.detach().copy_(random_like(tensor))
    gates = selection.mask.double().to(device_of(model))
    args, kwargs = tree_map_only(Tensor, random_like, as_call(example_inputs))
    with torch.no_grad():
        gated, wanted = (
            [t for t in tree_leaves(net(*copy.deepcopy(args), **copy.deepcopy(kwargs))) if isinstance(t, Tensor)]
            for net in (Gated(twin, graph, lambda: gates), masked(twin, selection))
        )
    for one, other in zip(gated, wanted, strict=True):
        if not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE):
            raise TraceError(
                f"gates change an output of the network by {float((one - other).abs().max()):.3g} against masks: some "
                "channels are mixed without a weight. Use a method that slices (`slimstart`) for this network"
            )


def _along(weight: Tensor, dim: int) -> list[int]:
    return [-1 if d == dim else 1 for d in range(weight.dim())]

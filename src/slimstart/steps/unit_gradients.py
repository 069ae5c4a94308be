r"""Unit gradients: how the loss changes with each unit, from the gradients that a step has anyway.

All that other layers read of a unit goes through columns of their weights, so a gate a at the unit is a factor of those
columns, and at a = 1

.. math:: \partial L / \partial a = \sum_{\text{columns}} w \cdot \partial L / \partial w .

A hook of the user's own optimizer computes it before every step, so it happens in any loop, and in a CUDA graph that
holds the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from slimstart.devices import cuda_devices
from slimstart.graph import ChannelGraph
from slimstart.graph.readers import LAYERS, Reader, readers
from slimstart.inputs import as_call
from slimstart.narrow import Networks
from slimstart.narrow.compact import tensor_places
from slimstart.narrow.optimizer_state import held_by
from slimstart.steps import calls


class UnitGradients:
    """Gradients of a gate at every unit, summed over the optimizers of an iteration.

    Args:
        graph: of the model, with coupling "stream".
        model: the dense one, which is run once on `example_inputs`.
        optimizers: over its parameters.

    Attributes:
        unobservable: (U,) bool, units whose gradient will not be known: something reads them, or may read them, that is
            not the weight of a layer in the optimizers.

    Raises:
        ValueError: the coupling is another one.
    """

    def __init__(
        self, graph: ChannelGraph, model: nn.Module, optimizers: Sequence[Optimizer], example_inputs: Any
    ) -> None:
        if graph.coupling != "stream":
            raise ValueError(
                f"`coupling` is {graph.coupling!r}; a policy that learns from gradients needs 'stream', where every "
                "channel has one unit"
            )
        self._num_units = graph.num_units
        named = dict(model.named_parameters())
        held = held_by(optimizers)
        trained = {name for name, p in named.items() if p.requires_grad and id(p) in held}
        found = readers(graph, model)
        self._readers = [reader for reader in found if reader.weight in trained]
        self.unobservable = _unobservable(graph, model, example_inputs, found, self._readers)
        self._sum: Tensor | None = None

    def prepare(self, networks: Networks) -> None:
        """Have everything on the device that `add` needs, so that it can be captured."""
        for reader in self._readers:
            networks.units_along(reader.axis)

    @torch.no_grad()
    def add(self, optimizer: Optimizer, networks: Networks) -> None:
        """Take the gradients of one optimizer's parameters, just before it steps."""
        parameters = networks.parameters
        if not all(parameters[reader.weight].requires_grad for reader in self._readers):
            self._sum = None  # something has been frozen since: a part of the sum would mislead
            return
        own = held_by([optimizer])
        columns, units = [], []
        for reader in self._readers:
            weight = parameters[reader.weight]
            if weight.grad is not None and id(weight) in own:  # no gradient where it took no part in this step
                others = [dim for dim in range(weight.dim()) if dim != reader.dim]
                kind = torch.promote_types(weight.dtype, torch.float32)
                columns.append((weight * weight.grad).sum(others, dtype=kind).double())
                units.append(networks.units_along(reader.axis))
        if not columns:
            return
        gradients = torch.zeros(self._num_units + 1, dtype=torch.float64, device=columns[0].device)
        gradients.index_add_(0, torch.cat(units), torch.cat(columns))
        gradients = gradients[:-1]  # the last is for what always stays
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it later, by itself
        gradients = gradients if scale is None else gradients / scale
        self._sum = gradients if self._sum is None else self._sum + gradients

    def take(self) -> Tensor | None:
        """(U,) float64 of the iteration, if anything was seen; the next one begins."""
        found, self._sum = self._sum, None
        return found


def _unobservable(
    graph: ChannelGraph, model: nn.Module, example_inputs: Any, found: list[Reader], observed: list[Reader]
) -> Tensor:
    """(U,) bool: units that something reads, or may read, which is not observed; and those that nothing reads.

    Args:
        example_inputs: for the model.
        found: all weights that are known to read.
        observed: those of them whose gradients will be seen.
    """
    mark = torch.ones(graph.num_units + 1, dtype=torch.bool)  # the last stands for what always stays
    for reader in found:
        mark[reader.units] = False
    for reader in found:
        if reader not in observed:
            mark[reader.units] = True
    for name in _perhaps_reading(graph, model, example_inputs, {reader.weight for reader in found}):
        for piece in graph.tensors[name]:
            mark[graph.units_along(piece.axis)] = True
    return mark[:-1]


def _perhaps_reading(graph: ChannelGraph, model: nn.Module, example_inputs: Any, known: set[str]) -> Iterator[str]:
    """Names of matrices with channels that are used in other ways than as the weight of a known layer."""
    places, modules = tensor_places(model), dict(model.named_modules(remove_duplicate=False))
    uses = _run(model, example_inputs)
    for name, parameter in model.named_parameters():
        owners = [modules[path] for path, _ in places[name]]
        if name not in graph.tensors or parameter.dim() < 2 or all(isinstance(o, nn.Embedding) for o in owners):
            continue
        if all(isinstance(owner, LAYERS) for owner in owners) and (name in known or id(parameter) not in uses.others):
            continue  # a known reader, or a layer that only writes, or one that does not mix channels
        yield name


class _Uses(TorchFunctionMode):
    """Notes parameters that are used in other ways than as the weight of a layer; their ids are in `others`."""

    def __init__(self) -> None:
        super().__init__()
        self.others: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(found)):  # its shape, or its type, is no use of it
            rest = (args[:1], args[2:], kwargs) if func in calls.LAYER_FUNCTIONS else (args, kwargs)
            self.others |= {id(leaf) for leaf in tree_leaves(rest) if isinstance(leaf, nn.Parameter)}
        return found


def _run(model: nn.Module, example_inputs: Any) -> _Uses:
    """See how a model uses its parameters."""
    modes = {module: module.training for module in model.modules()}
    (args, kwargs), uses = as_call(example_inputs), _Uses()
    model.eval()
    try:
        # With gradients: without them PyTorch runs some layers as one, and nothing is seen of their weights.
        with torch.enable_grad(), torch.random.fork_rng(devices=cuda_devices(model)), uses:
            model(*args, **kwargs)
    finally:
        for module, training in modes.items():
            module.training = training
    return uses

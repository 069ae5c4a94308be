r"""Unit gradients: the derivative of the loss by a gate at each unit, from the gradients of the weights.

Other layers read a unit through columns of their weights, so a gate a at the unit is a factor of those columns, and at
a = 1

.. math:: \partial L / \partial a = \sum_{\text{columns}} w \cdot \partial L / \partial w .

A hook on the user's optimizer computes it before every step, so it works in any loop, and in a CUDA graph of the
optimizer's step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from slimstart.devices import cuda_devices
from slimstart.graph import ChannelGraph
from slimstart.graph.readers import LAYERS, Reader, functional_readers, readers
from slimstart.inputs import as_call
from slimstart.narrow import Networks
from slimstart.narrow.compact import tensor_places
from slimstart.narrow.optimizer_state import held_by
from slimstart.policies import GradientLearner, Learner
from slimstart.steps import calls
from slimstart.steps.wrappers import uncompiled

logger = logging.getLogger(__name__)


class UnitGradients:
    """Gradients of a gate at every unit, summed over the optimizers of an iteration.

    Args:
        graph: graph of the model, with coupling "stream".
        model: the dense model, which is run once on `example_inputs`.
        example_inputs: inputs of the model.

    Attributes:
        unobservable: (U,) bool, units without a known gradient: something reads them, or may read them, that is not the
            weight of a layer in the optimizers.
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
        found = [*readers(graph, model), *functional_readers(graph, model)]
        self._readers = [reader for reader in found if reader.weight in trained and reader.length in {None, *trained}]
        self._lengths = {reader.length: named[reader.length] for reader in self._readers if reader.length is not None}
        self.unobservable = _unobservable(graph, model, example_inputs, found, self._readers)
        self._sum: Tensor | None = None
        self._freeze: Callable[[Tensor], None] | None = None

    @classmethod
    def for_learner(
        cls,
        learner: Learner,
        graph: ChannelGraph,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        example_inputs: Any,
        device: torch.device,
    ) -> UnitGradients:
        """Unit gradients for a learner, which freezes the widths of unobservable units and moves to a device."""
        if not isinstance(learner, GradientLearner):
            raise TypeError("`policy` learns from gradients, but its learner has no `freeze`, `to` and `observe_`")
        with uncompiled():
            gradients = cls(graph, model, optimizers, example_inputs)
        learner.freeze(gradients.unobservable)
        if bool(gradients.unobservable.all()):
            logger.warning(
                "no width can be learned: every channel group is read by something other than a trained Conv or "
                "Linear layer"
            )
        learner.to(device)
        gradients._freeze = learner.freeze
        return gradients

    def prepare(self, networks: Networks) -> None:
        """Create the tensors on the device that `add` needs, so that it can be captured."""
        for reader in self._readers:
            networks.units_along(reader.axis)

    @torch.no_grad()
    def add(self, optimizer: Optimizer, networks: Networks) -> None:
        """Add the gradients of one optimizer's parameters, just before it steps."""
        parameters = networks.network.parameters
        own = held_by([optimizer])
        # Of another optimizer's layers, which some trainers freeze while this one steps, nothing is asked.
        mine = [reader for reader in self._readers if id(parameters[reader.weight]) in own]
        if frozen := [reader for reader in mine if not parameters[reader.weight].requires_grad]:
            self._give_up(frozen)
        columns, units = [], []
        for reader in mine:
            weight = parameters[reader.weight]
            if weight.grad is not None:  # an unused layer has no gradient
                others = [dim for dim in range(weight.dim()) if dim != reader.dim]
                kind = torch.promote_types(weight.dtype, torch.float32)
                products = weight * weight.grad
                if reader.length is not None:
                    products = products + _radial(weight, self._lengths[reader.length])
                columns.append(products.sum(others, dtype=kind).double())
                units.append(networks.units_along(reader.axis))
        if not columns:
            return
        gradients = torch.zeros(self._num_units + 1, dtype=torch.float64, device=columns[0].device)
        gradients.index_add_(0, torch.cat(units), torch.cat(columns))
        gradients = gradients[:-1]  # the last entry is for channels of no unit
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its own kernel, later
        gradients = gradients if scale is None else gradients / scale
        self._sum = gradients if self._sum is None else self._sum + gradients

    def _give_up(self, frozen: Sequence[Reader]) -> None:
        """Keep the widths of all groups that layers read which are no longer trained: a part of a sum would mislead."""
        lost = self.unobservable.clone()
        for reader in frozen:
            lost[reader.units[reader.units >= 0]] = True
        if not torch.equal(lost, self.unobservable):
            self.unobservable = lost
            if self._freeze is not None:
                self._freeze(lost)
            names = sorted({reader.layer or reader.weight for reader in frozen})
            logger.warning(
                "the widths before %s are kept from now on, because a layer that reads them was frozen "
                "(`requires_grad`) while the structure is learned",
                ", ".join(names),
            )

    def take(self) -> Tensor | None:
        """(U,) float64, the sum of the iteration, or None; the next iteration begins."""
        found, self._sum = self._sum, None
        return found


def _radial(direction: Tensor, length: Tensor) -> Tensor:
    r"""What the gradient of a direction under weight norm lacks: its part along the direction.

    With :math:`w = g v / |v|`, each product :math:`w \, \partial L / \partial w` is
    :math:`v \, \partial L / \partial v + (v / |v|)^2 \, g \, \partial L / \partial g`.
    """
    if length.grad is None:
        return torch.zeros_like(direction)
    over = [dim for dim in range(direction.dim()) if length.shape[dim] == 1]
    squares = direction.square()
    return squares / squares.sum(over, keepdim=True) * (length * length.grad)


def _unobservable(
    graph: ChannelGraph, model: nn.Module, example_inputs: Any, found: list[Reader], observed: list[Reader]
) -> Tensor:
    """(U,) bool: units with a reader, certain or possible, that is not observed; and units without a reader.

    Args:
        example_inputs: inputs of the model.
        found: all weights that certainly read units.
        observed: the weights among them whose gradients are observed.
    """
    mark = torch.ones(graph.num_units + 1, dtype=torch.bool)  # the last entry is for channels of no unit
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
    """Names of matrices with channels that are used in another way than as the weight of a known layer."""
    places, modules = tensor_places(model), dict(model.named_modules(remove_duplicate=False))
    others = _uses(model, example_inputs)
    for name, parameter in model.named_parameters():
        owners = [modules[path] for path, _ in places[name]]
        if name not in graph.tensors or parameter.dim() < 2 or all(isinstance(o, nn.Embedding) for o in owners):
            continue
        if name in known and name in graph.weights:
            continue
        if all(isinstance(owner, LAYERS) for owner in owners) and (name in known or name not in others):
            continue  # a known reader, or a layer that only writes, or one that does not mix channels
        if _only_writes(graph, name) or (_is_vector(parameter) and name not in others):
            continue  # it is added to channels (a position embedding), or it is a scale
        yield name


def _only_writes(graph: ChannelGraph, name: str) -> bool:
    """Whether the only channels of a parameter that is used outside its module are those that it writes."""
    pieces = graph.tensors[name]
    return name in graph.filters and len(pieces) == 1 and graph.units_along(pieces[0].axis).equal(graph.filters[name])


def _is_vector(parameter: Tensor) -> bool:
    return parameter.numel() == max(parameter.shape, default=1)


_PRODUCTS = frozenset("mul rmul imul multiply weight_norm".split())  # of which a factor has an entry per channel


class _Uses(TorchFunctionMode):
    """Mode that collects, in `others`, the ids of parameters that are used in another way.

    That is: not as the weight of a layer, and not as a scale, with an entry per channel, that is a factor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.others: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_product = getattr(func, "__name__", "").strip("_") in _PRODUCTS
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(found)):  # not a query of a shape or a type
            rest = (args[:1], args[2:], kwargs) if func in calls.LAYER_FUNCTIONS else (args, kwargs)
            used = [leaf for leaf in tree_leaves(rest) if isinstance(leaf, nn.Parameter)]
            self.others |= {id(leaf) for leaf in used if not (is_product and _is_vector(leaf))}
        return found


def _uses(model: nn.Module, example_inputs: Any) -> set[str]:
    """Names of the parameters that a model uses in another way than as a layer's weight.

    A copy is run: a forward may leave something in the module, such as a bias that is cached in evaluation mode.
    """
    copied = copy.deepcopy(model)
    copied.eval()
    (args, kwargs), uses = as_call(example_inputs), _Uses()
    # With gradients: without them PyTorch fuses some layers (a transformer's), and hides their weights.
    with torch.enable_grad(), torch.random.fork_rng(devices=cuda_devices(copied)), uses:
        copied(*args, **kwargs)
    return {name for name, parameter in copied.named_parameters() if id(parameter) in uses.others}

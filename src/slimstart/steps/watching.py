r"""Watching: tell a policy, before every step of the optimizer, how the loss changes with each unit.

All that other layers read of a unit goes through columns of their weights, so a gate a at the unit is a factor of those
columns, and at a = 1

.. math:: \partial L / \partial a = \sum_{\text{columns}} w \cdot \partial L / \partial w

comes from gradients that are there already. A hook of the user's own optimizer does it, so it happens in any loop, and
in a CUDA graph that holds the optimizer's step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from slimstart.devices import cuda_devices
from slimstart.graph import ChannelGraph
from slimstart.graph.readers import LAYERS, Reader, readers
from slimstart.inputs import as_call
from slimstart.narrow import Networks
from slimstart.narrow.compact import tensor_places
from slimstart.policies import GradientLearner
from slimstart.steps import calls

logger = logging.getLogger(__name__)


class Watch:
    """What a policy is told of a network, between `start` and `stop`.

    It is made before the optimizer is given narrow parameters. The policy is asked at once to hold the groups of which
    it will not be told enough.

    Args:
        policy: that wants to know.
        graph: of the model, with coupling "stream".
        model: the dense one.
        optimizer: over its parameters.
        example_inputs: for the model, which is run on them once.

    Raises:
        ValueError: the coupling is another one.
    """

    def __init__(
        self,
        policy: GradientLearner,
        graph: ChannelGraph,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Any,
    ) -> None:
        if graph.coupling != "stream":
            raise ValueError(
                f"`coupling` is {graph.coupling!r}; a policy that learns from gradients needs 'stream', where every "
                "channel has one unit"
            )
        self._policy, self._optimizer, self._num_units = policy, optimizer, graph.num_units
        named = dict(model.named_parameters())
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        found = readers(graph, model)
        self._readers = [reader for reader in found if id(named[reader.weight]) in trained]
        self._hook: RemovableHandle | None = None
        held = unknown(graph, model, example_inputs, found, self._readers)
        self._knows_nothing = bool(held.all())
        policy.freeze(held)

    @property
    def is_on(self) -> bool:
        """Whether it tells."""
        return self._hook is not None

    def start(self, networks: Networks) -> None:
        """Tell of the network that is trained, from now on."""
        self.stop()
        if self._knows_nothing:
            logger.warning("widths stay at equal shares: of no group it is known that only trained layers read it")
        self._networks = networks
        self._policy.to(networks.device)
        self._hook = self._optimizer.register_step_pre_hook(self._before_step)

    def stop(self) -> None:
        """Tell no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(one is not None for one in (*args[1:], kwargs.get("closure"))):
            raise ValueError(
                "`optimizer.step` got a closure, which makes the gradients only then; this policy learns from them "
                "before the step: compute the loss and its backward first, or let `SparseTraining.step` do it"
            )
        parameters = self._networks.net.parameters
        if not all(parameters[reader.weight].requires_grad for reader in self._readers):
            return  # something has been frozen since: half of the truth would be none
        columns, units = [], []
        for reader in self._readers:
            weight = parameters[reader.weight]
            if weight.grad is not None:  # none where it took no part in this step
                others = [dim for dim in range(weight.dim()) if dim != reader.dim]
                kind = torch.promote_types(weight.dtype, torch.float32)
                columns.append((weight * weight.grad).sum(others, dtype=kind).double())
                units.append(self._networks.units_along(reader.axis))
        if columns:
            gradients = torch.zeros(self._num_units + 1, dtype=torch.float64, device=columns[0].device)
            gradients.index_add_(0, torch.cat(units), torch.cat(columns))
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes it out by itself, later
            self._policy.observe_(gradients[:-1] if scale is None else gradients[:-1] / scale)  # the last always stays


def unknown(
    graph: ChannelGraph, model: nn.Module, example_inputs: Any, found: list[Reader], watched: list[Reader]
) -> Tensor:
    """(U,) bool: units that something reads, or may read, which is not watched; and those that nothing reads.

    Args:
        example_inputs: for the model.
        found: all weights that are known to read.
        watched: those of them whose gradients will be seen.
    """
    mark = torch.ones(graph.num_units + 1, dtype=torch.bool)  # the last stands for what always stays
    for reader in found:
        mark[reader.units] = False
    for reader in found:
        if reader not in watched:
            mark[reader.units] = True
    for name in _perhaps_reading(graph, model, example_inputs, {reader.weight for reader in found}):
        for piece in graph.tensors[name]:
            mark[graph.units_along(piece.axis)] = True
    return mark[:-1]


def _perhaps_reading(graph: ChannelGraph, model: nn.Module, example_inputs: Any, known: set[str]) -> Iterator[str]:
    """Matrices with channels of which it is not known what they do, or that also do something else."""
    places, modules = tensor_places(model), dict(model.named_modules(remove_duplicate=False))
    uses = _run(model, example_inputs)
    for name, parameter in model.named_parameters():
        owners = [modules[path] for path, _ in places[name]]
        if name not in graph.tensors or parameter.dim() < 2 or all(isinstance(o, nn.Embedding) for o in owners):
            continue
        if all(isinstance(owner, LAYERS) for owner in owners) and (name in known or id(parameter) not in uses.others):
            continue  # it is known, or writes only, or works within channels
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

"""Bytes that a training step keeps until the backward, counted on networks of the user's model, for `Memory` budgets.

    table = measure_memory(model, images, optimizer_states=2)  # AdamW
    sparse = SparseTraining(model, optimizer, images[:2], Memory(0.5, table), total_steps=steps)

Autograd reports every tensor that it saves. Each storage that is held at the end of the forward counts once, in the
module that saved it first; parameters and buffers are not counted, because the network has them anyway. Forwards of the
dense network, with one unit left in each group, and without each removable layer, give the coefficients. Then other
networks must have the bytes that these predict: of random widths, and without several layers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slimstart.costs import Polynomial
from slimstart.devices import device_of, seeded
from slimstart.errors import BudgetError
from slimstart.graph import ChannelGraph
from slimstart.inputs import as_call
from slimstart.narrow import compact
from slimstart.policies.budgets import Params
from slimstart.policies.expected_cost import ExpectedCost
from slimstart.policies.latency import digest
from slimstart.policies.masks import places
from slimstart.policies.memory import Memory, MemoryTable, SavedBytes, between_channels
from slimstart.steps.measuring import random_networks, traced
from slimstart.steps.wrappers import unwrapped_model

CHECKED = 4  # random networks whose bytes are compared with the prediction
NOT_LINEAR = (
    "what the network saves for the backward is not linear in its numbers of channels, so `Memory` cannot count it "
    'exactly; residual streams with coupling="filter" are not: use '
    '`coupling="stream"`, or `Flops` or `Params`'
)
NOT_A_SUM = (
    "what the network saves for the backward without all of {names} is not what it saves less for each of them, so "
    "`Memory` cannot count it exactly; name some of them in `keep`, here and in the training"
)

Saved = Counter[int | None]  # bytes by the position of a removable layer; None for the rest of the network
Count = Callable[..., Saved]


def measure_memory(
    model: nn.Module,
    example_inputs: Any,
    *,
    optimizer_states: int = 1,
    coupling: str = "stream",
    keep: Iterable[str] = (),
    norms: str = "shrink",
) -> MemoryTable:
    """Count the bytes that training steps of narrow networks keep.

    It takes about a forward for each channel group, and two for each removable layer. Call it under the same
    `torch.autocast` as the training. Parameters without `requires_grad` are counted like the others.

    Args:
        model: the dense model; it is not changed.
        example_inputs: as for `SparseTraining`, but of the batch size that counts.
        optimizer_states: tensors of a parameter's size that the optimizer has: 1 for SGD with momentum, 2 for AdamW.
        coupling: as in the training.
        keep: as in the training.
        norms: as in the training; "keep" for a pretrained model.

    Raises:
        BudgetError: the bytes are not linear in the numbers of channels, so that they cannot be predicted exactly.
    """
    if type(optimizer_states) is not int or optimizer_states < 0:
        raise ValueError(f"`optimizer_states` is {optimizer_states!r}; it must be a whole number of at least 0")
    model = unwrapped_model(model)
    precisions = {parameter.element_size() for parameter in model.parameters()}
    if len(precisions) > 1:
        raise BudgetError("`model` has parameters of several precisions, whose bytes cannot be counted together")
    # A batch may be a view of a whole data set, whose storage is not kept for a step.
    args, kwargs = tree_map_only(Tensor, Tensor.clone, as_call(example_inputs))
    graph = traced(model, example_inputs, coupling, keep, norms)
    per_copy = _copy_size(model)

    def count(mask: Tensor, removed: Sequence[int] = ()) -> Saved:
        shorter = graph.without(graph.layers[i].name for i in removed)
        return saved_bytes(compact(model, shorter.select(mask)), graph, args, kwargs)

    def without_copies(mask: Tensor, removed: Sequence[int] = ()) -> Saved:
        found, costs = count(mask, removed), graph.costs.without(removed)

        def copies(params: Polynomial) -> int:
            return per_copy * ExpectedCost(costs, Polynomial(0, between_channels(params))).of_mask(mask)

        if per_copy:
            own: Saved = Counter(
                {i: copies(one.params) for i, one in enumerate(graph.costs.layers) if i not in removed}
            )
            own[None] = copies(costs.params) - own.total()
            found.subtract(own)
        return found

    per_parameter = (2 + optimizer_states) * precisions.pop()
    everything = torch.ones(graph.num_units, dtype=torch.bool)
    saved, layers = _coefficients(graph, without_copies)
    table = MemoryTable(
        structure=digest(graph.costs),
        batch=", ".join(str(tuple(value.shape)) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)),
        dense_bytes=count(everything).total() + per_parameter * int(Params(1.0).bind(graph.costs).dense),
        per_parameter=per_parameter,
        per_copy=per_copy,
        saved=saved,
        layers=layers,
    )
    order = tuple(range(len(graph.layers)))
    together = [(everything, removed) for removed in (*pairwise(order), order) if len(removed) > 1]
    for mask, removed in (*random_networks(graph, CHECKED, seed=0), *together):
        costs = graph.costs.without(removed)
        counted = count(mask, removed).total() + per_parameter * int(Params(1.0).bind(costs).cost(mask))
        if Memory(1.0, table).bind(costs).cost(mask) != counted:
            names = [graph.layers[layer].name for layer in removed]
            raise BudgetError(NOT_A_SUM.format(names=names) if names else NOT_LINEAR)
    return table


def _copy_size(model: nn.Module) -> int:
    """Bytes of an entry of a weight as autocast saves it, in addition to the parameter; 0 without autocast."""
    kind, precision = device_of(model).type, next(model.parameters()).dtype
    if precision != torch.float32 or not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return 0
    return torch.get_autocast_dtype(kind).itemsize


def _coefficients(graph: ChannelGraph, count: Count) -> tuple[SavedBytes, list[SavedBytes]]:
    """What the whole network saves, and each removable layer."""
    everything = torch.ones(graph.num_units, dtype=torch.bool)
    group = torch.unique(graph.costs.unit_group.cpu(), return_inverse=True)[1]
    sizes = torch.bincount(group)
    first = places(torch.zeros(graph.num_units), group) == 0
    one_left = [everything & (first | (group != number)) for number in range(len(sizes))]
    dense, narrow = count(everything), [count(mask) for mask in one_left]

    def linear(whole: int, parts: Sequence[int]) -> SavedBytes:
        """The function with this value at all units, and these values at one unit of each group."""
        fewer = whole - torch.tensor(parts, dtype=torch.int64)
        if (fewer % (sizes - 1).clamp(min=1)).any():
            raise BudgetError(NOT_LINEAR)
        of_units = fewer // (sizes - 1).clamp(min=1)
        return SavedBytes(whole - int(of_units @ sizes), of_units.tolist())

    def without(layer: int) -> SavedBytes:
        """What the network saves less without a layer.

        Mostly that is what the layer saves itself. But its input may be saved by the layer only, or its output by the
        next one, or a part of it remains.
        """
        less = dense.total() - count(everything, (layer,)).total()
        if less == dense[layer]:
            return linear(less, [one[layer] for one in narrow])
        pairs = zip(narrow, one_left, strict=True)
        return linear(less, [one.total() - count(mask, (layer,)).total() for one, mask in pairs])

    saved = linear(dense.total(), [one.total() for one in narrow])
    return saved, [without(layer) for layer in range(len(graph.layers))]


def saved_bytes(network: nn.Module, graph: ChannelGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Saved:
    """Bytes that a forward in training mode saves for the backward, by removable layer."""
    network.train()
    counted = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    saved: list[tuple[weakref.ref[_Saved], int | None]] = []
    with _places(network, graph) as place:

        def save(tensor: Tensor) -> _Saved:
            one = _Saved(tensor.detach())  # an operation that holds its own result would never be gone
            saved.append((weakref.ref(one), place[-1]))
            return one

        with (
            seeded(network),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(save, lambda one: one.tensor),
        ):
            output = network(*args, **kwargs)
    found: Saved = Counter()
    for reference, layer in saved:
        one = reference()  # None where the output does not depend on it: its operation is gone
        if one is not None and (address := one.tensor.untyped_storage().data_ptr()) not in counted:
            counted.add(address)
            found[layer] += one.tensor.untyped_storage().nbytes()
    del output
    return found


@dataclass(frozen=True, eq=False)
class _Saved:
    """A tensor that an operation holds for its backward."""

    tensor: Tensor


@contextmanager
def _places(network: nn.Module, graph: ChannelGraph) -> Iterator[list[int | None]]:
    """A stack whose last entry is the removable layer that runs, or None."""
    stack: list[int | None] = [None]
    with ExitStack() as hooks:
        for number, layer in enumerate(graph.layers):
            for name in layer.modules:
                module = network.get_submodule(name)

                def enter(module: nn.Module, args: Any, number: int = number) -> None:
                    stack.append(number)

                def leave(module: nn.Module, args: Any, output: Any) -> None:
                    stack.pop()

                hooks.callback(module.register_forward_pre_hook(enter).remove)
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield stack

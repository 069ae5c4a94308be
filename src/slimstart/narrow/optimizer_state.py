"""Optimizer state that follows the channels of its parameters.

State tensors with the shape of their parameter have channels (momentum, Adam's moments) and are narrow when it is;
scalars are not changed; anything else cannot follow the channels, and is refused by name. The state of channels that
are not in the network is stored unchanged, and restored with them.

A channel that has never been trained has the initial state of the optimizer (mostly zeros). Adam's `step` is one number
for the whole parameter, so there is no bias correction for a channel that is first used late; `docs/how-it-works.md`
has measurements.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.errors import OptimizerStateError
from slimstart.narrow.store import Key, Store

UNWRAPPED = ("optimizer", "base_optimizer", "_base_optimizer")  # attributes in which wrappers have their optimizer


def unwrapped(optimizers: Any) -> tuple[Optimizer, ...]:
    """The PyTorch optimizers in an argument of the user's: one, a list, or wrapped ones (Accelerate's, Lookahead).

    Raises:
        TypeError: an object is no optimizer, and wraps none.
        ValueError: an optimizer needs a closure that runs the model again.
        OptimizerStateError: two of them hold the same parameter.
    """
    found: list[Optimizer] = []
    for one in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
        seen = innermost(one)
        if not isinstance(seen, Optimizer):
            raise TypeError(
                f"`optimizer` is a {type(one).__name__}, which is no torch.optim.Optimizer and wraps none; pass the "
                "PyTorch optimizer that it uses"
            )
        closure = inspect.signature(seen.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"`optimizer` is {type(seen).__name__}, which cannot step without a closure that runs the model "
                "several times; slimstart needs one step for each forward and backward. Use SGD, Adam, AdamW, ..."
            )
        if held_by(found) & held_by([seen]):
            raise OptimizerStateError(
                "`optimizer`: two optimizers hold the same parameter, and each keeps its own state for it; pass every "
                "parameter to one of them only"
            )
        found.append(seen)
    return tuple(found)


def innermost(optimizer: Any) -> Any:
    """The optimizer inside all wrappers."""
    for name in UNWRAPPED:
        if isinstance(inner := getattr(optimizer, name, None), Optimizer):
            return innermost(inner)
    return optimizer


@dataclass(frozen=True)
class Entry:
    """A state tensor that has channels.

    Attributes:
        state: the optimizer's dict that has it.
        value: the narrow tensor.
        optimizer, group, parameter: to which it belongs.
    """

    name: str
    key: str
    state: dict[str, Any]
    value: Tensor
    optimizer: Optimizer
    group: dict[str, Any]
    parameter: nn.Parameter

    @property
    def place(self) -> Key:
        """The key of the dense tensor in a store."""
        return Key(self.name, self.key)

    def start_in(self, store: Store) -> float | None:
        """Initial value of entries of the dense tensor, as for `Store.like`; `initial` where the store has none yet."""
        return 0.0 if self.place in store else self.initial

    @property
    def initial(self) -> float | None:
        """The value of all entries before the first step; None where it is a copy of the parameter.

        Found by a step with zero gradient on two numbers: most optimizers start from zeros, Rprop from its learning
        rate, schedule-free ones from the parameter. State that a wrapper adds (Lookahead) is either zeros or a copy,
        whichever its present values are nearer to.
        """
        numbers = torch.arange(2, dtype=self.parameter.dtype, device=self.parameter.device)
        group = {**self.group, "weight_decay": 0} if "weight_decay" in self.group else self.group  # it is a gradient
        value = first_state(self.optimizer, group, numbers.clone()).get(self.key)
        if isinstance(value, Tensor) and value.shape == numbers.shape:
            return None if float(value[1]) - float(value[0]) > 0.5 else float(value[0])
        like_parameter = (self.value - self.parameter.detach()).norm() < self.value.norm()
        return None if bool(like_parameter) else 0.0


def entries(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> Iterator[Entry]:
    """All state tensors that have channels.

    Args:
        names: {id of a parameter that can shrink: its name}.

    Raises:
        OptimizerStateError: a state entry is neither shaped like its parameter nor a scalar, or two optimizers have
            one of the same name for the same parameter.
    """
    seen: set[tuple[str, str]] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                state = optimizer.state.get(parameter)
                if name is None or not state:
                    continue
                for key, value in state.items():
                    if _follows(optimizer, name, key, value, parameter.shape):
                        if (name, key) in seen:  # the store has one tensor for both
                            raise OptimizerStateError(
                                f"two optimizers keep {key!r} for {name}, and only one of them can follow the "
                                f"channels. Pass every parameter to one optimizer only, or name the layer in `keep`"
                            )
                        seen.add((name, key))
                        yield Entry(name, key, state, value, optimizer, group, parameter)


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """All parameters in the groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of all parameters in the groups."""
    return set(map(id, parameters_of(*optimizers)))


def _follows(optimizer: Optimizer, name: str, key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state entry has channels; raises an error if its shape does not say."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        if value is None or isinstance(value, Tensor | bool | int | float | str):
            return False
    elif value.shape == shape:
        return True
    described = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise OptimizerStateError(
        f"{type(optimizer).__name__} keeps {key!r} for {name}, {described}: it is neither shaped like the parameter "
        f"{tuple(shape)} nor a scalar, so it cannot follow the channels. Use an optimizer with element-wise state, or "
        f"protect the layer by naming it in `keep`"
    )


def check_state(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> None:
    """Refuse optimizers whose state cannot follow the channels, before they have any: found by a step of a copy.

    `names` as for `entries`.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            ours = [parameter for parameter in group["params"] if id(parameter) in names]
            for parameter in sorted(ours, key=lambda one: (-one.dim(), -one.numel()))[:1]:  # the largest matrix
                for key, value in first_state(optimizer, group, torch.zeros_like(parameter)).items():
                    _follows(optimizer, names[id(parameter)], key, value, parameter.shape)


def first_state(optimizer: Optimizer, group: dict[str, Any], numbers: Tensor) -> dict[str, Any]:
    """The state that an optimizer makes for some numbers in a step with zero gradient; the optimizer is not changed."""
    probe = copy.copy(optimizer)
    lone = nn.Parameter(numbers)
    lone.grad = torch.zeros_like(lone)
    probe.param_groups = [{**group, "params": [lone]}]
    probe.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # they count steps of the training
        setattr(probe, hooks, {})
    try:
        probe.step()
    except Exception:  # other libraries' optimizers may need more preparation than a gradient
        return {}
    return dict(probe.state.get(lone, {}))

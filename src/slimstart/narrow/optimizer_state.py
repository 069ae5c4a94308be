"""Point a user's optimizer at a sub-network and back; its state follows the channels.

The optimizer object, its parameter groups and their hyper-parameters stay: schedulers, weight-decay splits and
gradient scalers go on working. Only the parameters inside the groups are exchanged. A state tensor that is shaped like
its parameter is gathered and scattered with it; scalars (a step count) are carried along; anything else cannot follow,
and is refused by name. The state of channels that are absent rests, bit-unchanged, in dense tensors kept here.

A channel that has never been trained has the state that the optimizer starts from (mostly zeros). Adam's `step`
is one number for the whole parameter, so a channel that first wakes late finds its bias correction used up: see
`docs/how-it-works.md` for what that does, measured.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.errors import OptimizerStateError
from slimstart.graph import Selection


class OptimizerLink:
    """Keeps an optimizer pointed at the narrow parameters.

    Args:
        optimizer: holds the dense parameters now; from the first `point` on the narrow ones.
        dense: the dense parameters that become narrow, by name.
    """

    def __init__(self, optimizer: Optimizer, dense: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        names = {id(parameter): name for name, parameter in dense.items()}
        self._dense = dense
        self._names: list[list[str | None]] = [
            [names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups
        ]
        if dense and not self.names:
            raise ValueError(
                "`optimizer` holds none of the model's parameters that become narrow; build it from "
                "`model.parameters()`, anew if another SparseTraining has used it"
            )
        if _needs_closure(optimizer):
            raise ValueError(
                f"`optimizer` is {type(optimizer).__name__}, which cannot step without a closure that runs the model "
                "again; slimstart steps once for each forward and backward. Use SGD, Adam, AdamW or the like"
            )
        self._state: dict[str, dict[str, Any]] = {}
        for name in self.names:
            self._take(name, dense[name])

    @property
    def names(self) -> list[str]:
        """Narrow parameters that the optimizer updates."""
        return [name for group in self._names for name in group if name is not None]

    @property
    def dense_shapes(self) -> list[torch.Size]:
        """The dense shapes of all parameters in the groups, in their order."""
        return [
            parameter.shape if name is None else self._dense[name].shape
            for group, names in zip(self.optimizer.param_groups, self._names, strict=False)
            for parameter, name in zip(group["params"], names, strict=True)
        ]

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        """Take over dense-shaped state that the optimizer holds for a parameter."""
        entries = self.optimizer.state.get(parameter, {})
        for key, value in entries.items():
            _follows(self.optimizer, name, key, value, self._dense[name].shape)
        self.optimizer.state.pop(parameter, None)  # only now: a refused optimizer keeps what it has
        for key, value in entries.items():
            self._state.setdefault(name, {})[key] = value.detach().clone() if isinstance(value, Tensor) else value

    @torch.inference_mode(False)
    @torch.no_grad()
    def point(
        self,
        parameters: Mapping[str, nn.Parameter],
        selection: Selection,
        ready: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Exchange the parameters in the groups for these, and give each its part of the dense state.

        Args:
            ready: {id of a dense state tensor: its part}, where somebody has seen to that already.
        """
        optimizer, ready = self.optimizer, ready or {}
        for group, names in zip(optimizer.param_groups, self._names, strict=False):
            for position, name in enumerate(names):
                if name is None:
                    continue
                before, now = group["params"][position], parameters[name]
                state = optimizer.state.pop(before, {})
                fresh = {}
                for key, value in self._state.get(name, {}).items():
                    if id(value) in ready:
                        fresh[key] = ready[id(value)]
                    elif isinstance(value, Tensor) and value.shape == self._dense[name].shape and value.dim() > 0:
                        old = state.get(key)
                        if not isinstance(old, Tensor) or old.shape != now.shape:
                            old = torch.empty_like(now, dtype=value.dtype, requires_grad=False)
                        fresh[key] = old.copy_(selection.gather(name, value))
                    else:
                        fresh[key] = value
                group["params"][position] = now
                if fresh:
                    optimizer.state[now] = fresh

    @torch.inference_mode(False)
    @torch.no_grad()
    def store(self, selection: Selection) -> None:
        """Write the state of the narrow parameters back into the dense state."""
        for name, dense, narrow in self.pairs():
            selection.scatter_(name, dense, narrow.to(dense.device))

    @torch.inference_mode(False)
    @torch.no_grad()
    def pairs(self) -> list[tuple[str, Tensor, Tensor]]:
        """(name, dense, narrow) for every state tensor that follows the channels; scalars are carried over at once."""
        found = []
        for group, names in zip(self.optimizer.param_groups, self._names, strict=False):
            for parameter, name in zip(group["params"], names, strict=True):
                if name is None:
                    continue
                dense = self._state.setdefault(name, {})
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if not _follows(self.optimizer, name, key, value, parameter.shape):
                        dense[key] = value
                        continue
                    if not isinstance(dense.get(key), Tensor) or dense[key].dim() == 0:
                        start = _initial_value(self.optimizer, group, parameter, key)
                        dense[key] = torch.full_like(self._dense[name].detach(), start, dtype=value.dtype)
                    found.append((name, dense[key], value))
        return found

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the state tensors of the narrow parameters are; another tuple when there are others."""
        state = self.optimizer.state
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        return tuple(v.data_ptr() for p in held for v in state.get(p, {}).values() if isinstance(v, Tensor))

    def dense_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state dict with dense state in place of narrow: what it would be without us."""
        state = dict(state_dict["state"])
        for index, name in enumerate(name for group in self._names for name in group):
            if name is not None:
                state.pop(index, None)
                if self._state.get(name):
                    state[index] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self._state[name].items()}
        return {**state_dict, "state": dict(sorted(state.items()))}

    def release(self, state_dict: Mapping[str, Any]) -> None:
        """Before the optimizer loads a dense state dict: hold the dense parameters, until `adopt`.

        PyTorch puts what it loads on the device of the parameter that it belongs to.
        """
        groups = self.optimizer.param_groups
        if [len(group["params"]) for group in state_dict["param_groups"]] != [len(g["params"]) for g in groups]:
            return  # it will be refused, and nothing may have changed then
        for group, names in zip(groups, self._names, strict=False):
            for position, name in enumerate(names):
                if name is not None:
                    self.optimizer.state.pop(group["params"][position], None)
                    group["params"][position] = self._dense[name]

    def adopt(self, parameters: Mapping[str, nn.Parameter], selection: Selection) -> None:
        """After the optimizer has loaded a dense state dict: take it over and hand out the narrow part."""
        self._state = {}
        for group, names in zip(self.optimizer.param_groups, self._names, strict=False):
            for parameter, name in zip(group["params"], names, strict=True):
                if name is not None:
                    self._take(name, parameter)
        self.point(parameters, selection)


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _follows(optimizer: Optimizer, name: str, key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state entry has channels; raises where that cannot be told."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        if value is None or isinstance(value, Tensor | bool | int | float | str):
            return False
    elif value.shape == shape:
        return True
    described = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise OptimizerStateError(
        f"{type(optimizer).__name__} keeps {key!r} for {name}, {described}: it is neither shaped like the parameter "
        f"{tuple(shape)} nor a scalar, so it cannot follow the channels. Use an optimizer with element-wise state, or "
        f"leave the layer whole by naming it in `keep`"
    )


def _initial_value(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter, key: str) -> float:
    """What a state tensor holds before anything has been learned, found by a step of zero gradient on one number.

    Most optimizers start from zeros; Rprop, say, does not.
    """
    value = first_state(optimizer, group, torch.zeros(1, dtype=parameter.dtype, device=parameter.device)).get(key)
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else 0.0


def first_state(optimizer: Optimizer, group: dict[str, Any], numbers: Tensor) -> dict[str, Any]:
    """The state that an optimizer makes for some numbers in a step of zero gradient; it learns nothing of it."""
    probe = copy.copy(optimizer)
    lone = nn.Parameter(numbers)
    lone.grad = torch.zeros_like(lone)
    probe.param_groups = [{**group, "params": [lone]}]
    probe.state = defaultdict(dict)
    try:
        probe.step()
    except Exception:  # a foreign optimizer may want more than a step
        return {}
    return dict(probe.state.get(lone, {}))

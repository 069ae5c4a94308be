"""The user's optimizers: hooks around their steps, and what a captured step needs of them.

With several optimizers (Muon for matrices, AdamW for the rest) an iteration ends when the last of them has stepped, or,
where one of them steps less often, when another one is about to step again. Gradients that an optimizer has not used
yet must survive a change of structure: of an optimizer that steps less often, or whose step a gradient scaler skipped.

A CUDA graph holds an optimizer's step only if the learning rate is a tensor and a bad step can be skipped on the
device. PyTorch's fused SGD, Adam and AdamW have both; with any other optimizer, steps run eagerly.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from slimstart.narrow.optimizer_state import held_by, innermost, parameters_of

FUSED = (SGD, Adam, AdamW)

# For hooks in `torch.compile(optimizer.step)`; the public `torch.compiler.disable` imports Dynamo at once.
_not_compiled = torch._disable_dynamo  # type: ignore[attr-defined]


# --- hooks ------------------------------------------------------------------------------------------------------------


class StepHooks:
    """Hooks on optimizers that report every step and every end of an iteration, until `remove`.

    Args:
        before_step: called with an optimizer that is about to step and has its gradients; with a closure, after it.
        end_iteration: called when an iteration has ended; with False where gradients still wait for another step.
        no_gradients_wait: called after a step within an iteration that leaves no unused gradients.
        narrowed: parameters that no other optimizer may update, because its state would not follow their shapes.

    Attributes:
        capturing: whether a CUDA graph is being captured. A captured step ends no iteration, and no tensor may be read.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        before_step: Callable[[Optimizer], None],
        end_iteration: Callable[[bool], None],
        no_gradients_wait: Callable[[], None],
        narrowed: Iterable[Tensor],
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._before_step, self._end_iteration = before_step, end_iteration
        self._no_gradients_wait = no_gradients_wait
        self._used: dict[int, list[tuple[TensorWeakRef, int]]] = {}  # by optimizer, the gradients of its last step
        self._stepped: set[int] = set()
        self._skipped: set[int] = set()
        self.capturing = False
        self._handles = [
            handle
            for optimizer in self._optimizers
            for handle in (optimizer.register_step_pre_hook(self._pre), optimizer.register_step_post_hook(self._post))
        ]
        self._narrowed = set(map(id, narrowed))
        self._unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _watch(self)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        _watching.discard(self)

    @property
    def is_first(self) -> bool:
        """Whether the step that is about to run is the first of its iteration."""
        return not self._stepped

    @property
    def is_last(self) -> bool:
        """Whether the step that is about to run is the last of its iteration."""
        return len(self._stepped) >= len(self._optimizers) - 1

    @_not_compiled
    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_nested(optimizer):
            return None
        if id(optimizer) in self._stepped:
            self._stepped.clear()
            self._end_iteration(False)
        if self._is_skipped(optimizer):
            self._skipped.add(id(optimizer))
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before_step(optimizer)
            return None
        reported = False

        def reporting_closure() -> Any:
            nonlocal reported
            loss = closure()
            if not reported:
                self._before_step(optimizer)
                reported = True
            return loss

        if len(args) > 1:
            return (args[0], reporting_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": reporting_closure}

    def refuse_others(self, optimizer: Optimizer) -> None:
        """Refuse another optimizer that is about to update parameters that are narrowed."""
        if optimizer in self._optimizers or optimizer in self._unrelated or innermost(optimizer) in self._optimizers:
            return
        if self._narrowed & held_by([optimizer]):
            raise RuntimeError(
                f"another {type(optimizer).__name__} than the SparseTraining was given is about to update its model; "
                "the structure would not be learned, and the state of this optimizer would not follow it. Use the same "
                "object throughout, or give a list of all optimizers; to go on with a new one, call `finish` before"
            )
        self._unrelated.add(optimizer)

    def _is_skipped(self, optimizer: Optimizer) -> bool:
        """Whether a gradient scaler turns the step of a fused optimizer into a no-op, after infinite gradients."""
        found_inf = getattr(optimizer, "found_inf", None)
        return isinstance(found_inf, Tensor) and not self.capturing and bool(found_inf)

    @_not_compiled
    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.capturing or _is_nested(optimizer):
            return
        if id(optimizer) in self._skipped:
            self._skipped.discard(id(optimizer))
            return
        self._stepped.add(id(optimizer))
        if len(self._optimizers) == 1:
            self._stepped.clear()
            self._end_iteration(True)
            return
        self._used[id(optimizer)] = [(TensorWeakRef(grad), grad._version) for grad in _gradients(optimizer)]
        waiting = any(map(self._has_unused_gradients, self._optimizers))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._end_iteration(not waiting)
        elif not waiting:
            self._no_gradients_wait()

    def _has_unused_gradients(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has gradients that were not there, or not complete, in its last step."""
        found, used = _gradients(optimizer), self._used.get(id(optimizer), [])
        # Weak references, not ids: a new gradient often gets the id of one that `zero_grad` has freed.
        same = len(found) == len(used) and all(
            ref() is grad and version == grad._version for grad, (ref, version) in zip(found, used, strict=True)
        )
        return bool(found) and not same


_watching: weakref.WeakSet[StepHooks] = weakref.WeakSet()
_hook: list[RemovableHandle] = []


def _watch(hooks: StepHooks) -> None:
    """Let `hooks` see the steps of all optimizers, as long as somebody else holds them.

    PyTorch keeps hooks on all optimizers for the whole program, so there is one for all trainings. It is never removed:
    a training can be collected during a step, while PyTorch iterates over these hooks.
    """
    _watching.add(hooks)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_refuse_others))


@_not_compiled
def _refuse_others(optimizer: Optimizer, *_: Any) -> None:
    for hooks in tuple(_watching):
        hooks.refuse_others(optimizer)


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def check_optimizers(optimizers: Sequence[Optimizer], pretrained: bool | None) -> None:
    """Refuse optimizers of another training."""
    hooks = [hook for one in optimizers for hook in one._optimizer_step_pre_hooks.values()]
    if any(isinstance(getattr(hook, "__self__", None), StepHooks) for hook in hooks):
        raise ValueError(
            "`optimizer` is in a SparseTraining already; give every model an optimizer of its own, or put the "
            "models into one module"
        )
    if pretrained is False and any(one.state for one in optimizers):
        raise ValueError(
            "`pretrained` is False, but the optimizer has state; make a new one, or leave `pretrained` out"
        )


def _is_nested(optimizer: Optimizer) -> bool:
    """Whether the hook that asks runs within another step of the same optimizer, which calls the same hooks.

    In a subclass that calls `super().step()`, PyTorch adds the hooks to both methods. A counter would be wrong after an
    error in a step, which calls no hook; the stack is not.
    """
    hooked: CodeType | None = None  # PyTorch's wrapper around `step`
    outer: FrameType | None = sys._getframe(2)
    while outer is not None:
        if (hooked is None or outer.f_code is hooked) and outer.f_locals.get("self") is optimizer:
            if hooked is not None:
                return True
            hooked = outer.f_code
        outer = outer.f_back
    return False


# --- fused kernels ----------------------------------------------------------------------------------------------------


def fuse(optimizer: Optimizer, device: torch.device | None = None) -> bool:
    """Switch an optimizer to its fused kernels, if it has some; returns whether its step can be captured.

    Args:
        device: future device of the parameters, if it is not the present one.
    """
    if type(optimizer) not in FUSED:
        return False
    parameters = parameters_of(optimizer)
    device = device or parameters[0].device
    if device.type != "cuda" or not all(p.is_floating_point() for p in parameters):
        return False
    if len({p.device for p in parameters}) > 1:
        return False
    if any(group.get("differentiable") or group.get("maximize") for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            group["capturable"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # the constructor sets it with `fused`
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):  # fused kernels need it on the device; the others keep it on the CPU
            state["step"] = state["step"].to(device, torch.float32)
    return True


def unfuse(optimizer: Optimizer) -> None:
    """Undo settings that only a GPU supports, after a state dict from a GPU was loaded on another device."""
    for group in optimizer.param_groups:
        if group.get("capturable") and not all(p.is_cuda for p in group["params"]):
            group["capturable"] = False


def has_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer has created its state, which must not happen during a capture."""
    return all(
        any(isinstance(value, Tensor) for p in group["params"] for value in optimizer.state.get(p, {}).values())
        for group in optimizer.param_groups
        if group.get("momentum", 1) != 0  # SGD without momentum has no state
    )


def complete_momentum(optimizer: Optimizer) -> None:
    """Give SGD the missing momentum buffers: its fused kernels need them for all parameters with a gradient, or none.

    Zeros are what the first step of such a parameter would start from, without dampening.
    """
    if type(optimizer) is not SGD:
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            trained = [p for p in group["params"] if p.grad is not None]
            lacking = [p for p in trained if optimizer.state[p].get("momentum_buffer") is None]
            if len(lacking) < len(trained):
                for parameter in lacking:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class CapturedRates:
    """Learning rates as tensors that a graph reads, kept equal to those in the optimizer's groups."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._rates: list[Tensor] = []
        self._values: list[float] = []

    def follow(self) -> None:
        """Copy the learning rates that a scheduler has set since the last call."""
        for _ in self._optimizer.param_groups[len(self._rates) :]:
            self._rates.append(torch.zeros((), device=self._device))
            self._values.append(math.nan)
        for number, (group, rate) in enumerate(zip(self._optimizer.param_groups, self._rates, strict=True)):
            value = group["lr"]
            if isinstance(value, Tensor):
                rate.copy_(value)
                self._values[number] = math.nan
            elif value != self._values[number]:
                rate.fill_(value)
                self._values[number] = value

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Put the tensors in place of the numbers, for a capture."""
        self.follow()
        groups = self._optimizer.param_groups
        values = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(groups, values, strict=True):
                group["lr"] = value


def settings(optimizer: Optimizer) -> tuple[Any, ...]:
    """All hyper-parameters but the learning rate: a graph holds them as constants."""
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in ("params", "lr", "initial_lr") and not isinstance(value, Tensor)
    )

"""Iterations: hooks on the user's optimizers that show gradients before a step, and tell when an iteration has ended.

Gradients that an optimizer has not used yet must outlive a change of structure, so with several optimizers `may_change`
says whether some are waiting: of an optimizer that steps less often, or whose step a gradient scaler has skipped.

With several optimizers (Muon for matrices, AdamW for the rest) an iteration ends when the last of them has stepped, or,
where one of them steps less often, when another one is about to step again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Iterations:
    """Hooks on optimizers, until `remove`.

    Args:
        optimizers: one or several.
        before: called with an optimizer that is about to step, when its gradients are there: with a closure, after it.
        after: called when an iteration has ended; with False where gradients are waiting for another step.
        rest: called after any other step, of several optimizers, after which no gradients are waiting.

    Attributes:
        captured: while it is true, `after` is not called, and no number is read: a step is captured, which ends no
            iteration.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        before: Callable[[Optimizer], None],
        after: Callable[[bool], None],
        rest: Callable[[], None],
    ) -> None:
        self._optimizers, self._before, self._after, self._rest = tuple(optimizers), before, after, rest
        self._used: dict[int, list[tuple[int, int]]] = {}  # of every optimizer, the gradients of its last step
        self._stepped: set[int] = set()
        self._skipped: set[int] = set()
        self.captured = False
        self._handles = [
            handle
            for optimizer in self._optimizers
            for handle in (optimizer.register_step_pre_hook(self._pre), optimizer.register_step_post_hook(self._post))
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @property
    def begins(self) -> bool:
        """Asked before a step: whether it is the first of its iteration."""
        return not self._stepped

    @property
    def others_have_stepped(self) -> bool:
        """Asked before a step: whether it is the last of its iteration."""
        return len(self._stepped) >= len(self._optimizers) - 1

    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_nested(optimizer):
            return None
        if id(optimizer) in self._stepped:
            self._stepped.clear()
            self._after(False)
        if self._is_skipped(optimizer):
            self._skipped.add(id(optimizer))
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before(optimizer)
            return None
        seen = False

        def observed() -> Any:
            nonlocal seen
            loss = closure()
            if not seen:
                self._before(optimizer)
                seen = True
            return loss

        return ((args[0], observed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": observed})

    def _is_skipped(self, optimizer: Optimizer) -> bool:
        """Whether a gradient scaler makes a fused optimizer do nothing, because gradients are not finite."""
        found_inf = getattr(optimizer, "found_inf", None)
        return isinstance(found_inf, Tensor) and not self.captured and bool(found_inf)

    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.captured or _is_nested(optimizer):
            return
        if id(optimizer) in self._skipped:
            self._skipped.discard(id(optimizer))
            return
        self._stepped.add(id(optimizer))
        if len(self._optimizers) == 1:
            self._stepped.clear()
            self._after(True)
            return
        self._used[id(optimizer)] = _gradients(optimizer)
        waiting = any(_gradients(one) not in (self._used.get(id(one)), []) for one in self._optimizers)
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._after(not waiting)
        elif not waiting:
            self._rest()


def is_observed(optimizer: Optimizer) -> bool:
    """Whether an optimizer has such hooks."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), Iterations) for hook in hooks)


def _gradients(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Which gradients an optimizer's parameters have: another list when a backward has added to them."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [(id(grad), grad._version) for grad in held if grad is not None]


def _is_nested(optimizer: Optimizer) -> bool:
    """Asked in a hook: whether the step runs within another one of the same optimizer, which has the same hooks.

    So it is in a subclass that calls `super().step()`: PyTorch adds the hooks to both. The stack says so even after an
    error in a step, which calls no hook.
    """
    hooked = sys._getframe(2)  # PyTorch's wrapper around `step`
    outer = hooked.f_back
    while outer is not None:
        if outer.f_code is hooked.f_code and outer.f_locals.get("self") is optimizer:
            return True
        outer = outer.f_back
    return False

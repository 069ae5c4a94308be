"""Hooks on a user's model that do nothing in a copy or a pickle of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class OwnHook:
    """A hook that calls a method. Its copies call nothing, and the original lists them.

    Attributes:
        copies: hooks in copies of the model, as long as those exist.
    """

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._method = method
        self.copies: weakref.WeakSet[OwnHook] = weakref.WeakSet()

    @property
    def is_inert(self) -> bool:
        """Whether it belongs to a copy of the model."""
        return self._method is None

    def __call__(self, *args: Any) -> Any:
        return self._method(*args) if self._method is not None else None

    def __reduce__(self) -> Any:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHook:
        inert = type(self)()
        self.copies.add(inert)
        return inert


class Hook(OwnHook):
    """A hook of a `SparseTraining`, which shows that the model is in one."""


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks from a model or a copy."""
    kinds = (module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    for hooks in kinds:
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "hook", hook), Hook):  # PyTorch wraps some of them
                del hooks[key]


def hooks_in(module: nn.Module) -> list[Hook]:
    """The hooks that `remove_hooks` would remove."""
    found = [*module._state_dict_hooks.values(), *module._load_state_dict_pre_hooks.values()]
    return [hook for hook in (getattr(one, "hook", one) for one in found) if isinstance(hook, Hook)]

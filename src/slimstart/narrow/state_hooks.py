"""Hooks that keep a model's and an optimizer's own state dicts dense while they hold a narrow network.

A user's checkpointing calls `model.state_dict()` and `optimizer.state_dict()` whenever it likes, and must not find
half-trained or narrow tensors there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class Hook:
    """Calls a method; a copy or a pickle of the hook does nothing."""

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> Any:
        return self._method(*args) if self._method is not None else None

    def __reduce__(self) -> Any:
        return Hook, (None,)


class Signal(Hook):
    """A hook whose method wants none of the arguments."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__()

    def __reduce__(self) -> Any:
        return Signal, (None,)


def keep_dense(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    sync: Callable[[], None],
    reload: Callable[[], None],
    release: Callable[..., Any],
    adopt: Callable[[], None],
    dense: Callable[..., Any],
) -> None:
    """Register the hooks.

    Args:
        sync: bring the dense model and state up to date; called before either is asked for or loaded.
        reload: the dense model has been loaded.
        release: given the optimizer and the dense state dict that it is about to load.
        adopt: the optimizer has loaded a dense state dict.
        dense: given the optimizer and its narrow state dict, the dense one.
    """
    optimizer.register_state_dict_pre_hook(Signal(sync))
    optimizer.register_state_dict_post_hook(Hook(dense))
    optimizer.register_load_state_dict_pre_hook(Hook(release))
    optimizer.register_load_state_dict_post_hook(Signal(adopt))
    model.register_state_dict_pre_hook(Signal(sync))
    model.register_load_state_dict_pre_hook(Signal(sync))  # a dict may hold only some of the tensors
    model.register_load_state_dict_post_hook(Signal(reload))


def remove_from(module: nn.Module) -> None:
    """Take the hooks out of a copy of a model, where they mean nothing."""
    kinds = (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    for hooks in kinds:
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "hook", hook), Hook):  # PyTorch wraps some of them
                del hooks[key]

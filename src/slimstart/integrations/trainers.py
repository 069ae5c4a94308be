"""Parts that the callbacks of all trainers use: the policy, the module, its example inputs, narrow state dicts."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from slimstart.errors import CheckpointError
from slimstart.narrow.shrink import METADATA, metadata_of, shrink_to
from slimstart.policies import Policy, get_policy


def policy_of_gradients(policy: str | Policy, callback: str, lines: str) -> Policy:
    """The policy, if it learns inside `optimizer.step()`.

    Args:
        callback: name of the callback, for the error.
        lines: code to write instead for a policy that learns from losses.
    """
    found = get_policy(policy)
    if found.learns_from != "gradients":
        raise ValueError(
            f"`policy` is {policy!r}, which learns from the losses of two networks on the same batch; {callback} sees "
            f"no losses. Make a slimstart.SparseTraining yourself, and write in {lines}"
        )
    return found


class _FirstCallError(Exception):
    """The first call of a module, raised before it runs."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = args, kwargs


@torch.no_grad()
def example_of(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Two examples of the inputs of a module, taken from its first call within `run`, which is stopped there.

    The state of PyTorch's generators is restored.

    Raises:
        RuntimeError: `run` does not call the module.
    """

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _FirstCallError(args, kwargs)

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.random.fork_rng(enabled=True):
            run()
    except _FirstCallError as first:
        return _two_examples(_inputs(module, *first.call))
    finally:
        handle.remove()
    raise RuntimeError(
        f"a training step does not call the {type(module).__name__} that is to be narrowed; name the module that it "
        "calls, or give `example_inputs`"
    )


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as `example_inputs`: all positional, or all by name."""
    if not kwargs:
        return args
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments) if args else kwargs


def _two_examples(inputs: Any) -> Any:
    """The first two examples of a batch: of all tensors that have as many entries as the first one.

    With lists it is the whole batch: their entries may be examples (a detector's images) or parts of all examples.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    size = len(tensors[0]) if tensors else 0
    parts = tree_leaves(inputs, is_leaf=lambda part: isinstance(part, list))
    whole = any(isinstance(part, list) for part in parts)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        has_batch = leaf.dim() > 0 and len(leaf) == size and not whole
        return (leaf[:2] if has_batch else leaf).detach().clone()

    return tree_map(cut, inputs)


def fit_to(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Make a dense module as narrow as a state dict of which a part is narrow, in place.

    Raises:
        CheckpointError: the module is narrower than the state dict, or of another class.
    """
    own = module.state_dict()
    if not any(key in own and own[key].shape != value.shape for key, value in tensors_in(state_dict)):
        return
    name = narrow_part(state_dict)
    if name is not None and name not in dict(module.named_modules()):
        raise CheckpointError(f"the state dict has the structure of {name!r}, and {type(module).__name__} has no such")
    prefix = f"{name}." if name else ""
    part = OrderedDict((k[len(prefix) :], v) for k, v in state_dict.items() if k.startswith(prefix))
    metadata = metadata_of(state_dict).get(name or "", {})
    part._metadata = {"": metadata}  # type: ignore[attr-defined]
    shrink_to(module.get_submodule(name or ""), part)


def narrow_part(state_dict: Mapping[str, Any]) -> str | None:
    """The name of the module whose structure a state dict has in its metadata, if there is one."""
    return next((name for name, found in metadata_of(state_dict).items() if METADATA in found), None)


def tensors_in(state_dict: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The entries of a state dict that are tensors."""
    return [(key, value) for key, value in state_dict.items() if isinstance(value, Tensor)]

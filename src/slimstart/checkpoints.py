"""Files of training state: written atomically, read without executing code, checked before anything changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstart.errors import CheckpointError

FORMAT = "slimstart.training/1"
_KEYS = {"format", "coupling", "structure", "num_steps", "held_steps", "settled", "masks", "policy", "model"}
_KEYS |= {"optimizer", "random"}


def write(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state dict; a file of that name is either the old one or the new one, never half of either."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    torch.save(dict(state), partial)
    partial.replace(path)


def read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read what `write` wrote.

    Raises:
        CheckpointError: the file is missing, truncated or not of tensors and plain values.
    """
    try:
        state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be read as a checkpoint: {error}") from error
    return state


def check(state: Any, own: Mapping[str, Any], parameter_shapes: Sequence[torch.Size]) -> None:
    """Refuse a state dict that is not of the training whose own state dict is given.

    Args:
        parameter_shapes: dense shapes of the optimizer's parameters, in their order.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise CheckpointError(f"this is not a state dict of SparseTraining (no 'format': {FORMAT!r})")
    if missing := sorted(_KEYS - state.keys()):
        raise CheckpointError(f"the state dict lacks {', '.join(missing)}; it is incomplete")
    for key in ("coupling", "structure"):
        if state[key] != own[key]:
            raise CheckpointError(
                f"the state dict has {key}={state[key]!r}, this training {own[key]!r}: another network, or other `keep`"
            )
    if _shapes(state["model"]) != _shapes(own["model"]):
        raise CheckpointError("the state dict's model has other tensors or shapes than this one")
    masks, own_masks = state["masks"], own["masks"]
    if not isinstance(masks, Tensor) or masks.dtype != torch.bool or masks.shape[1:] != own_masks.shape[1:]:
        raise CheckpointError("the state dict's masks do not fit the network")
    optimizer = state["optimizer"]
    if missing := sorted({"state", "param_groups"} - optimizer.keys()):
        raise CheckpointError(f"the state dict's optimizer lacks {', '.join(missing)}; it is incomplete")
    if _groups(optimizer) != _groups(own["optimizer"]):
        raise CheckpointError("the state dict's optimizer is of another kind, or has other parameter groups")
    for index, entries in optimizer["state"].items():
        for key, value in entries.items():
            if getattr(value, "ndim", 0) > 0 and value.shape != parameter_shapes[index]:
                raise CheckpointError(
                    f"the state dict's optimizer has {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(parameter_shapes[index])}"
                )


def _shapes(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(tensor, "shape", None) for name, tensor in model.items()}


def _groups(optimizer: Mapping[str, Any]) -> list[tuple[int, frozenset[str]]]:
    """The number of parameters of each group, and the hyper-parameters it has."""
    return [(len(group["params"]), frozenset(group)) for group in optimizer["param_groups"]]

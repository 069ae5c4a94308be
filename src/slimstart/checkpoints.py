"""Files of training state: atomic, checksummed, read without executing code, checked before anything changes.

A file is what `torch.save` writes, with a checksum of it behind the end, which `torch.load` does not mind.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from slimstart import atomic
from slimstart.errors import CheckpointError

FORMAT = "slimstart.training/1"
_KEYS = {"format", "coupling", "structure", "num_steps", "held_steps", "settled", "masks", "room", "pending", "policy"}
_KEYS |= {"model", "optimizer", "random"}


_SEAL = b"\nslimstart blake2b "
_DIGEST_SIZE = 32
_CHUNK = 1 << 22


class _Sealing:
    """A file that remembers the checksum of what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=_DIGEST_SIZE)

    def write(self, content: bytes) -> int:
        self._hash.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        self._file.write(_SEAL + self._hash.hexdigest().encode())


def write(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state dict; a file of that name is either the old one or the new one, never half of either.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written to; the old file is still there.
    """

    def put(file: BinaryIO) -> None:
        sealing = _Sealing(file)
        torch.save(dict(state), sealing)  # type: ignore[arg-type]  # any object with `write` will do
        sealing.seal()

    try:
        atomic.write_with(path, put)
    except (OSError, RuntimeError) as error:  # PyTorch's writer wraps what the disk says in a RuntimeError
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(f"{os.fspath(path)!r} cannot be written: {cause}") from error


def read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read what `write` wrote.

    Raises:
        CheckpointError: the file is missing, truncated, altered, or not of tensors and plain values.
    """
    try:
        with open(path, "rb") as file:
            _check_seal(file)
            file.seek(0)
            state: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:  # no fault of the file's
        raise
    except Exception as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be read as a checkpoint: {error}") from error
    return state


def _check_seal(file: BinaryIO) -> None:
    length = len(_SEAL) + 2 * _DIGEST_SIZE
    remaining = file.seek(0, os.SEEK_END) - length
    file.seek(max(remaining, 0))
    seal = file.read()
    file.seek(0)
    found = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    while remaining > 0:
        chunk = file.read(min(_CHUNK, remaining))
        found.update(chunk)
        remaining -= len(chunk)
    if seal != _SEAL + found.hexdigest().encode():
        raise ValueError("its checksum is wrong: it is truncated, altered, or no checkpoint of slimstart")


def check(state: Any, own: Mapping[str, Any], parameter_shapes: Sequence[torch.Size]) -> None:
    """Refuse a state dict that is not of a training.

    Args:
        own: of the state dict that this training has itself, what must agree with it; of tensors the shapes count.
        parameter_shapes: dense shapes of the optimizer's parameters, in their order.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise CheckpointError(f"this is not a state dict of SparseTraining (no 'format': {FORMAT!r})")
    if missing := sorted(_KEYS - state.keys()):
        raise CheckpointError(f"the state dict lacks {', '.join(missing)}; it is incomplete")
    if unknown := sorted(map(str, state.keys() - _KEYS)):
        raise CheckpointError(f"the state dict has {', '.join(unknown)} too; it was written by another version")
    for key in ("coupling", "structure"):
        if state[key] != own[key]:
            raise CheckpointError(
                f"the state dict has {key}={state[key]!r}, this training {own[key]!r}: other network, policy or `keep`"
            )
    if _shapes(state["model"]) != _shapes(own["model"]):
        raise CheckpointError("the state dict's model has other tensors or shapes than this one")
    for masks in (state["masks"], *([] if state["pending"] is None else [state["pending"]])):
        if not isinstance(masks, Tensor) or masks.dtype != torch.bool or masks.shape[1:] != own["masks"].shape[1:]:
            raise CheckpointError("the state dict's masks do not fit the network")
    room = state["room"]
    if not isinstance(room, Mapping) or (room and own["room"] and _shapes(room) != _shapes(own["room"])):
        raise CheckpointError("the state dict's room for units does not fit the network")
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

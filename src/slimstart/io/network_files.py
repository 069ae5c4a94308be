"""Files of finished networks: tensors in safetensors, the structure in JSON, no pickle.

A narrow network is the user's own class with smaller tensors. Loading needs the class (`model_factory` builds the dense
network, as before training) and the structure file: values of integer attributes, and the ports of layers on residual
streams.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.errors import CheckpointError
from slimstart.io import atomic
from slimstart.io.files import read_bytes
from slimstart.narrow.compact import RECORD, Record, read_count, tensor_names, tensor_places, write_count
from slimstart.narrow.removed_layers import checked, replacement
from slimstart.narrow.stream_ports import BUFFERS, Side, StreamPort, set_port

_FORMAT = "slimstart.network/1"
_FEW_BYTES = 1 << 20  # that a file may have whatever its network
_MAX_ITEMSIZE = 16  # of a complex number
_ATTEMPTS = 5  # to read two files that belong together


def _paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    path = Path(path)
    tensors = path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")
    return tensors, tensors.with_suffix(".json")


def save(network: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a finished network to `path` (.safetensors) and its structure to a .json file next to it.

    At any moment, `load` finds the old network or the new one.

    Args:
        network: a result of `finish`, `snapshot` or `compact`.
        path: file name, with or without .safetensors.
    """
    from safetensors.torch import save as to_bytes

    record = vars(network).get(RECORD)
    if not isinstance(record, Record):
        raise ValueError(
            "`network` does not come from `finish`, `snapshot` or `compact`, so its structure is not known"
        )
    ports = {name: layer for name, layer in network.named_modules() if isinstance(layer, StreamPort)}
    own = {f"{name}.{buffer}" for name in ports for buffer in BUFFERS}
    tensors = {n: t.detach().contiguous().clone() for n, t in tensor_names(network).items() if n not in own}
    blob = to_bytes(tensors)
    key = hashlib.sha256(blob).hexdigest()
    structure = {
        "format": _FORMAT,
        "sha256": key,
        "dense": {name: list(shape) for name, shape in record.dense.items()},
        "attributes": [[m, a, int(read_count(network.get_submodule(m), a))] for m, a in record.counted],
        "ports": {
            name: {
                "read": None if layer.stream_read is None else layer.stream_read.tolist(),
                "write": None if layer.stream_write is None else layer.stream_write.tolist(),
                "width": layer.stream_width,
                "dims": list(layer.stream_dims),
            }
            for name, layer in ports.items()
        },
        "removed": record.removed,
    }
    structure["digest"] = _digest(structure)
    tensors_path, structure_path = _paths(path)
    content = (json.dumps(structure, indent=1) + "\n").encode()
    atomic.write_pair(tensors_path, blob, structure_path, content, key)


def _digest(structure: dict[str, Any]) -> str:
    """Hash of the structure without its digest."""
    rest = {key: value for key, value in structure.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def load(path: str | os.PathLike[str], model_factory: Callable[[], nn.Module]) -> nn.Module:
    """Read a network that `save` wrote.

    Args:
        path: file name that was given to `save`.
        model_factory: function without arguments that builds the dense network.

    Raises:
        CheckpointError: a file is missing, truncated, of another kind, or of another class of network.
    """
    from safetensors.torch import load as from_bytes

    network = model_factory()
    if not isinstance(network, nn.Module):
        raise CheckpointError(f"`model_factory` returned a {type(network).__name__}; it must build the dense network")
    blob, structure = _read(path, [tensor.shape for tensor in tensor_names(network).values()])
    try:
        _rebuild(network, from_bytes(blob), structure)
    except MemoryError:  # the files may be fine
        raise
    except Exception as error:  # whatever a changed structure leads to
        raise CheckpointError(f"{os.fspath(path)!r} does not fit what `model_factory` builds: {error}") from error
    return network


def _read(path: str | os.PathLike[str], shapes: Sequence[torch.Size]) -> tuple[bytes, dict[str, Any]]:
    """The content of both files; no more than a network can have whose dense tensors have these shapes."""
    tensors_path, structure_path = _paths(path)
    max_bytes = _FEW_BYTES + sum(_MAX_ITEMSIZE * shape.numel() + 500 for shape in shapes)
    max_structure = _FEW_BYTES + sum(32 * sum(shape) + 500 for shape in shapes)
    for _ in range(_ATTEMPTS):
        try:
            blob = read_bytes(tensors_path, max_bytes)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{os.fspath(path)!r} cannot be read: {error}") from error
        sha256 = hashlib.sha256(blob).hexdigest()
        structure = _read_structure(structure_path, atomic.waiting(structure_path, sha256), max_structure)
        if structure.get("sha256") == sha256:
            return blob, structure
        # Another process may have saved since the tensors were read.
    raise CheckpointError(f"{tensors_path.name!r} is truncated or does not belong to {structure_path.name!r}")


def _read_structure(path: Path, waiting: Path, max_bytes: int) -> dict[str, Any]:
    try:
        try:
            content = read_bytes(waiting, max_bytes)
        except FileNotFoundError:
            content = read_bytes(path, max_bytes)
        structure = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(structure, dict) or structure.get("format") != _FORMAT:
        raise CheckpointError(f"{path.name!r} is not a structure file of slimstart ({_FORMAT!r})")
    if structure.get("digest") != _digest(structure):
        raise CheckpointError(f"{path.name!r} has been modified after it was written")
    return structure


@torch.no_grad()
def _rebuild(network: nn.Module, tensors: dict[str, Tensor], structure: dict[str, Any]) -> None:
    known = structure.get("removed", {})  # not in the oldest files
    removed = {str(name): checked(instead) for name, instead in known.items()}
    if "" in removed:
        raise ValueError("the network itself is removed")
    for name, instead in removed.items():
        network.set_submodule(name, replacement(network.get_submodule(name), instead))
    dense = tensor_names(network)
    shapes = {name: list(tensor.shape) for name, tensor in dense.items()}
    if odd := sorted(shapes.keys() ^ structure["dense"].keys()) or sorted(
        name for name, shape in shapes.items() if shape != structure["dense"][name]
    ):
        raise ValueError(f"the dense networks differ in {odd[:5]}")
    places = tensor_places(network)
    for name, old in dense.items():
        value = tensors[name].to(old.device)
        if value.dim() != old.dim() or any(size > most for size, most in zip(value.shape, old.shape, strict=True)):
            raise ValueError(f"{name!r} has the shape {tuple(value.shape)}, the dense one has {tuple(old.shape)}")
        fresh = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        for path, key in places[name]:
            setattr(network.get_submodule(path), key, fresh)
    for module_name, attribute, value in structure["attributes"]:
        module = network.get_submodule(module_name)
        dense_value = read_count(module, attribute)
        if type(dense_value) is not int:  # anything else would change how the module works
            raise ValueError(f"{attribute!r} of {module_name!r} is no number of channels")
        write_count(module, attribute, _number(value, dense_value))
    for name, port in structure["ports"].items():
        layer, most = network.get_submodule(name), max(shapes[f"{name}.weight"])
        width, (first, second) = _number(port["width"], most), port["dims"]
        sides = [None if i is None else Side(_indices(i)) for i in (port["read"], port["write"])]
        if sides[1] is not None and int(sides[1].index.max()) >= width:
            raise ValueError(f"{name!r} writes channel {int(sides[1].index.max())} of {width}")
        set_port(layer, sides[0], sides[1], width, (-_number(-first, 8), -_number(-second, 8)))
    counted = tuple((module, attribute) for module, attribute, _ in structure["attributes"])
    vars(network)[RECORD] = Record(counted, {name: tuple(shape) for name, shape in shapes.items()}, removed)


def _number(value: Any, most: int) -> int:
    """A checked number of channels."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{reprlib.repr(value)} is no number from 0 to {most}")
    return value


def _indices(values: Any) -> Tensor:
    indices = torch.tensor(values, dtype=torch.int64)
    if indices.dim() != 1 or not indices.numel() or int(indices.min()) < 0:
        raise ValueError("the channels of a port are no list of indices")
    return indices

"""Files of finished networks: safetensors, with the structure as JSON in their metadata, no pickle.

A narrow network is the user's own class with smaller tensors. Loading needs the class (`model_factory` builds the dense
network, as before training) and the structure: values of integer attributes, and the ports of layers on residual
streams.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from slimstart.errors import CheckpointError
from slimstart.io import atomic
from slimstart.io.files import read_bytes
from slimstart.narrow.compact import RECORD, Record, read_count, tensor_names, tensor_places, write_count
from slimstart.narrow.removed_layers import checked, replacement
from slimstart.narrow.stream_ports import BUFFERS, Side, StreamPort, set_port

_KEY = "slimstart"  # in the metadata
_FORMAT = "slimstart.network/2"
_FEW_BYTES = 1 << 20  # that a file may have whatever its network
_MAX_ITEMSIZE = 16  # of a complex number


def _named(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")


def save(network: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a finished network to `path` (.safetensors), with its structure in the metadata.

    At any moment, `load` finds the old network or the new one.

    Args:
        network: a result of `finish`, `snapshot` or `compact`.
        path: file name, with or without .safetensors.
    """
    record = vars(network).get(RECORD)
    if not isinstance(record, Record):
        raise ValueError(
            "`network` does not come from `finish`, `snapshot` or `compact`, so its structure is not known"
        )
    ports = {name: layer for name, layer in network.named_modules() if isinstance(layer, StreamPort)}
    own = {f"{name}.{buffer}" for name in ports for buffer in BUFFERS}
    tensors = {n: t.detach().contiguous().clone() for n, t in tensor_names(network).items() if n not in own}
    structure: dict[str, Any] = {
        "format": _FORMAT,
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
    structure["sha256"] = _digest(structure, tensors)
    metadata = {"format": "pt", _KEY: json.dumps(structure)}  # Accelerate reads no metadata without this "format"
    atomic.write(_named(path), _ordered(to_bytes(tensors, metadata)))


def _ordered(content: bytes) -> bytes:
    """A file with its metadata in order, so that equal networks have equal files: safetensors has a random one."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(content)[8 + size :]])


def _digest(structure: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Hash of the structure, without its digest, and of the tensors."""
    rest = {key: value for key, value in structure.items() if key != "sha256"}
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    found = hashlib.sha256(json.dumps([rest, shapes], sort_keys=True).encode())
    for _, tensor in sorted(tensors.items()):
        found.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def is_network(path: Path) -> bool:
    """Whether a safetensors file has a structure, as those of `save` have."""
    with safe_open(path, "pt") as file:
        return _KEY in (file.metadata() or {})


def load(path: str | os.PathLike[str], model_factory: Callable[[], nn.Module]) -> nn.Module:
    """Read a network that `save` wrote.

    Args:
        path: file name that was given to `save`.
        model_factory: function without arguments that builds the dense network.

    Raises:
        CheckpointError: the file is missing, truncated, of another kind, or of another class of network.
    """
    network = model_factory()
    if not isinstance(network, nn.Module):
        raise CheckpointError(f"`model_factory` returned a {type(network).__name__}; it must build the dense network")
    tensors, structure = _read(path, [tensor.shape for tensor in tensor_names(network).values()])
    try:
        _rebuild(network, tensors, structure)
    except MemoryError:  # the file may be fine
        raise
    except Exception as error:  # whatever a changed structure leads to
        raise CheckpointError(f"{os.fspath(path)!r} does not fit what `model_factory` builds: {error}") from error
    return network


def _read(path: str | os.PathLike[str], shapes: Sequence[torch.Size]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and structure of a file; it is refused if dense tensors of these shapes would take less."""
    max_header = _FEW_BYTES + sum(32 * sum(shape) + 1000 for shape in shapes)
    structure = None
    try:
        blob = read_bytes(_named(path), max_header + sum(_MAX_ITEMSIZE * shape.numel() for shape in shapes))
        if (size := int.from_bytes(blob[:8], "little")) > max_header:
            raise ValueError(f"its header has more than {max_header:,} bytes")
        with contextlib.suppress(KeyError, TypeError):
            structure = json.loads(json.loads(blob[8 : 8 + size])["__metadata__"][_KEY])
        if not isinstance(structure, dict) or structure.get("format") != _FORMAT:
            raise ValueError(
                f"its metadata has no structure ({_FORMAT!r}); a network with its structure in a .json file was "
                "written before the first release, and has to be saved again"
            )
        tensors = from_bytes(blob)
        if structure.get("sha256") != _digest(structure, tensors):
            raise ValueError("it has been modified after it was written")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be read: {error}") from error
    return tensors, structure


@torch.no_grad()
def _rebuild(network: nn.Module, tensors: dict[str, Tensor], structure: dict[str, Any]) -> None:
    removed = {str(name): checked(instead) for name, instead in structure["removed"].items()}
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

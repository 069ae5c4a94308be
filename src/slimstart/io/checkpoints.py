"""Checkpoint files: written atomically, with a checksum, and read without executing code.

A file is the output of `torch.save` followed by its checksum, which `torch.load` ignores.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from slimstart.errors import CheckpointError
from slimstart.io import atomic, plain_pickles
from slimstart.io.files import open_to_read

_SEAL = b"\nslimstart blake2b "
_DIGEST_SIZE = 32
_CHUNK = 1 << 22


class _Hashing:
    """A file that computes the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=_DIGEST_SIZE)

    def write(self, content: bytes) -> int:
        self._hash.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()

    def write_checksum(self) -> None:
        self._file.write(_SEAL + self._hash.hexdigest().encode())


def write(state: Mapping[str, Any], path: str | os.PathLike[str], is_link_allowed: bool = True) -> None:
    """Write a state dict to a file, atomically.

    Args:
        is_link_allowed: whether the folder of the file may be a link.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable; an older file of that name is unchanged.
    """

    def put(file: BinaryIO) -> None:
        hashing = _Hashing(file)
        torch.save(dict(state), hashing)  # type: ignore[arg-type]  # any object with `write` is fine
        hashing.write_checksum()

    try:
        atomic.write_with(path, put, is_link_allowed)
    except (OSError, RuntimeError) as error:  # PyTorch's writer wraps an OSError in a RuntimeError
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(f"{os.fspath(path)!r} cannot be written: {cause}") from error


def read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a file that `write` wrote.

    Raises:
        CheckpointError: the file is missing, truncated, altered, or holds more than tensors and plain values.
    """
    try:
        with open_to_read(path) as file:
            _check_checksum(file)
            sizes = _check_sizes(file)
            file.seek(0)
            plain_pickles.check_tensors(torch._C.PyTorchFileReader(file).get_record("data.pkl"), sizes)
            file.seek(0)
            state: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:  # the file may be fine
        raise
    except pickle.UnpicklingError as error:  # PyTorch's message advises to execute what is in the file
        raise CheckpointError(
            f"{os.fspath(path)!r} cannot be read as a checkpoint: it holds more than tensors and plain values"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be read as a checkpoint: {error}") from error
    return state


def _check_sizes(file: BinaryIO) -> dict[str, int]:
    """Refuse an archive that unpacks to more than its own size; ours are not compressed.

    Returns:
        The number of bytes of each storage, by its key.
    """
    length = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if packed or sum(member.file_size for member in members) > length:
        raise ValueError("it unpacks to more than its own size: it is not a checkpoint of slimstart")
    storages = ((member.filename.split("/"), member.file_size) for member in members)  # such as "archive/data/3"
    sizes = {parts[2]: size for parts, size in storages if len(parts) == 3 and parts[1] == "data"}
    if len({member.filename for member in members}) != len(members):
        raise ValueError("it has two members of the same name")
    return sizes


def _check_checksum(file: BinaryIO) -> None:
    length = len(_SEAL) + 2 * _DIGEST_SIZE
    remaining = file.seek(0, os.SEEK_END) - length
    file.seek(max(remaining, 0))
    seal = file.read()
    if not seal.startswith(_SEAL):
        remaining = 0  # it need not be read
    file.seek(0)
    found = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    while remaining > 0:
        chunk = file.read(min(_CHUNK, remaining))
        found.update(chunk)
        remaining -= len(chunk)
    if seal != _SEAL + found.hexdigest().encode():
        raise ValueError("its checksum is wrong: it is truncated, altered, or not a checkpoint of slimstart")

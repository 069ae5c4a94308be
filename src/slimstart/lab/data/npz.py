"""Read named arrays of an .npz file whose sizes are known: no more memory than they need, and no pickles."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from slimstart.errors import DataError
from slimstart.io.files import open_to_read

_MAX_HEADER = 10_000  # bytes, as in numpy
_CHUNK = 1 << 18


def read(path: Path, max_bytes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The named arrays of a file, in that order.

    Args:
        path: path of the file.
        max_bytes: largest size of each array.

    Raises:
        DataError: the file is truncated or corrupt, or has no such arrays, or larger ones.
    """
    try:
        with open_to_read(path) as file, zipfile.ZipFile(file) as archive:
            return {name: _array(archive, name, limit) for name, limit in max_bytes.items()}
    except MemoryError:  # the file may be fine
        raise
    except Exception as error:  # zipfile and numpy have no one error for damaged files
        raise DataError(
            f"{path} is damaged, or not an .npz with {', '.join(max_bytes)}: {error}; download it again"
        ) from error


def _array(archive: zipfile.ZipFile, name: str, max_bytes: int) -> np.ndarray:
    """One array; the sizes that its header and the directory of the archive claim are checked before memory is used."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in a way that numpy does not write")
    with archive.open(member) as file:
        shape, by_columns, kind = _header(file)
        if kind.hasobject:
            raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
        num_bytes = math.prod(shape) * kind.itemsize
        if not 0 <= num_bytes <= max_bytes:
            raise ValueError(f"{name} has {num_bytes:,} bytes, more than the {max_bytes:,} of this data set")
        content = np.empty(num_bytes, np.uint8)
        for start in range(0, num_bytes, _CHUNK):
            part = content[start : start + _CHUNK]
            part[:] = np.frombuffer(file.read(len(part)), np.uint8)  # not in one: zipfile would copy it many times
        if file.read(1):  # at the end, where the checksum is compared
            raise ValueError(f"{name} has more than the {num_bytes:,} bytes of its shape")
    return content.view(kind).reshape(shape, order="F" if by_columns else "C")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file, _MAX_HEADER)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file, _MAX_HEADER)
    raise ValueError(f"it has arrays of the version {version}, which names of fields need only")

"""Atomic writes: after a crash at any moment a file has its old content or its new one, never a part of either."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the content of a file; if that fails, the file is unchanged."""

    def put(file: BinaryIO) -> None:
        file.write(content)

    write_with(path, put)


def write_with(path: str | os.PathLike[str], put: Callable[[BinaryIO], None]) -> None:
    """Replace the content of a file by what `put` writes into it piece by piece."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            put(file)
            file.flush()
            os.fsync(file.fileno())  # without it a power cut can leave the new name on an empty file
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # instead of the partial file, or of none if the disk is full
        raise

"""Files that are either the old one or the new one, never half of either, whenever the machine stops."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Put `content` in the place of whatever `path` holds; if that fails, `path` is as before."""

    def put(file: BinaryIO) -> None:
        file.write(content)

    write_with(path, put)


def write_with(path: str | os.PathLike[str], put: Callable[[BinaryIO], None]) -> None:
    """The same, for content that `put` writes piece by piece into the open file."""
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
            error.filename = str(path)  # not the partial file, and a full disk names none at all
        raise

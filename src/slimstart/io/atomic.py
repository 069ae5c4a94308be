"""Atomic writes: after a crash at any moment a file has its old content or its new one, never a part of either.

The content is written to a new file with a name of its own, which then takes the name of the old one. So two processes
can write one file at the same time, and a link of that name is replaced instead of followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from slimstart.io.files import Folder

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None  # type: ignore[assignment]

_PARTIAL = r"\.[0-9a-f]{16}\.partial"


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the content of a file; if that fails, the file is unchanged."""
    write_with(path, lambda file: file.write(content))


def write_with(path: str | os.PathLike[str], put: Callable[[BinaryIO], object], is_link_allowed: bool = True) -> None:
    """Replace the content of a file by what `put` writes into it piece by piece.

    Args:
        put: called with the open file.
        is_link_allowed: whether the folder of the file may be a link.
    """
    path = Path(path)
    try:
        with Folder(path.parent, is_link_allowed) as folder:
            remove_partials(folder, re.escape(path.name))
            _replace(folder, path.name, put)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # instead of the partial file, or of none if the disk is full
            error.filename2 = None
        raise


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in this block for the same folder."""
    with Folder(path) as folder:
        if folder.handle is not None:
            _lock(folder.handle, wait=True)
        yield


def remove_partials(folder: Folder, name: str) -> None:
    """Remove what killed processes have left of files whose name matches a regular expression."""
    partial = re.compile(name + _PARTIAL)
    for found in filter(partial.fullmatch, folder.names()):
        with contextlib.suppress(OSError):
            handle = folder.open(found, os.O_RDWR)
            try:
                if _lock(handle, wait=False):  # otherwise it is being written
                    folder.remove(found)
            finally:
                os.close(handle)


def _replace(folder: Folder, name: str, put: Callable[[BinaryIO], object]) -> None:
    partial, handle = _new_file(folder, name)
    try:
        with os.fdopen(handle, "wb") as file:
            put(file)
            file.flush()
            os.fsync(file.fileno())  # without it a power cut can leave the new name on an empty file
            if fcntl is not None:
                folder.replace(partial, name)  # while it is locked
        if fcntl is None:
            folder.replace(partial, name)  # Windows does not rename open files
    except BaseException:
        with contextlib.suppress(OSError):
            folder.remove(partial)
        raise


def _new_file(folder: Folder, name: str) -> tuple[str, int]:
    """The name and the handle of a new, locked file."""
    while True:
        partial = f"{name}.{secrets.token_hex(8)}.partial"
        handle = folder.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        _lock(handle, wait=True)
        if os.fstat(handle).st_nlink:
            return partial, handle
        os.close(handle)  # another process took it for one that was left, before it was locked


def _lock(handle: int, wait: bool) -> bool:
    """Whether this process has the lock of a file now; there may be file systems without locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True

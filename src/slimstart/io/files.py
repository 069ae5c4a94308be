"""Files that somebody else may have made: opened without following links, waiting for a pipe, or reading too much."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

# Windows has neither links that are common nor handles of folders; there, names are joined to paths.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
_HAS_HANDLES = hasattr(os, "O_DIRECTORY")
_LINK = "it is a link, which is not followed"


class Folder:
    """An open folder: its files are found by name in the folder itself, wherever its path leads in the meantime.

    Args:
        is_link_allowed: whether the last part of the path may be a link.

    Raises:
        OSError: there is no such folder, or it is a link.
    """

    def __init__(self, path: Path, is_link_allowed: bool = True) -> None:
        self.path = path
        self.handle: int | None = None
        if not is_link_allowed and path.is_symlink():  # a clearer message than "not a directory"
            raise OSError(errno.ELOOP, _LINK, str(path))
        if _HAS_HANDLES:
            self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | (0 if is_link_allowed else _NO_LINK))
            # Also after an interrupt within `__exit__`: the handle may hold a lock, for which others wait.
            self._close = weakref.finalize(self, os.close, self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.handle is not None:
            self._close()
            self.handle = None

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        return sorted(os.listdir(self.path if self.handle is None else self.handle))

    def open(self, name: str, flags: int, mode: str) -> BinaryIO:
        """Open a regular file; links are not followed, and nothing waits for the other end of a pipe.

        Args:
            flags: as for `os.open`.
            mode: as for `open`, binary, and in accord with the flags.
        """
        try:
            handle = os.open(self._named(name), flags | _NO_LINK | _NO_WAIT, 0o666, dir_fd=self.handle)
        except OSError as error:
            reason = _LINK if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
            raise OSError(error.errno, reason, str(self.path / name)) from None
        return cast(BinaryIO, os.fdopen(_regular(handle, self.path / name), mode))

    def replace(self, name: str, new_name: str) -> None:
        os.replace(self._named(name), self._named(new_name), src_dir_fd=self.handle, dst_dir_fd=self.handle)

    def remove(self, name: str) -> None:
        """Remove a file, or a link itself; nothing happens if there is none."""
        try:
            os.unlink(self._named(name), dir_fd=self.handle)
        except FileNotFoundError:
            return

    def _named(self, name: str) -> str:
        return str(self.path / name) if self.handle is None else name


def open_to_read(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file; a folder, a pipe or a device is refused at once.

    Raises:
        OSError: there is no such file, or it is not a regular one.
    """
    return os.fdopen(_regular(os.open(path, os.O_RDONLY | _NO_WAIT), path), "rb")


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `max_bytes`.
    """
    with open_to_read(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def _regular(handle: int, path: str | os.PathLike[str]) -> int:
    if not stat.S_ISREG(mode := os.fstat(handle).st_mode):
        os.close(handle)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(
            number, os.strerror(number) if stat.S_ISDIR(mode) else "it is not a regular file", os.fspath(path)
        )
    return handle

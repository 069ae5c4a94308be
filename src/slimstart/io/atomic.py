"""Atomic writes: after a crash at any moment a file has its old content or its new one, never a part of either.

The content is written to a new file with a name of its own, which then takes the name of the old one. So two processes
can write one file at the same time, and a link of that name is replaced instead of followed. Where the files of a
folder belong together, one rename decides which of them a reader finds: `replacing`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from slimstart.io.files import Folder

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None  # type: ignore[assignment]

_PARTIAL = r"\.[0-9a-f]{16}\.partial"
_NEW_FILES = ".slimstart-new"


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
def replacing(path: Path, obsolete: str) -> Iterator[Path]:
    """Replace files of a folder together: in the block, they are written to the folder that this returns.

    One rename decides: from then on they are in a complete folder within the folder, which `newest` finds, until each
    of them has its place.

    Args:
        path: path of the folder, which is made if there is none.
        obsolete: regular expression of names of older files, which are removed if there are no new ones.
    """
    path.mkdir(parents=True, exist_ok=True)
    with turn(path):
        for left in path.glob(f"{_NEW_FILES}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        if newest(path) != path:  # the writer was stopped
            _put_in_place(path, obsolete)
        new = path / f"{_NEW_FILES}.{secrets.token_hex(8)}.partial"
        new.mkdir()
        try:
            yield new
            for file in new.iterdir():
                with file.open("rb+") as content:
                    os.fsync(content.fileno())
            new.rename(path / _NEW_FILES)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        _put_in_place(path, obsolete)


def newest(path: Path) -> Path:
    """The folder that has the newest files of a folder."""
    new = path / _NEW_FILES
    return new if new.is_dir() and not new.is_symlink() else path


def _put_in_place(path: Path, obsolete: str) -> None:
    new = path / _NEW_FILES
    names = sorted(os.listdir(new))
    for name in names:
        partial = path / f"{name}.{secrets.token_hex(8)}.partial"
        try:
            os.link(new / name, partial)
        except OSError:  # a file system without hard links
            shutil.copyfile(new / name, partial)
        partial.replace(path / name)
    with Folder(path) as folder:
        for name in filter(re.compile(obsolete).fullmatch, folder.names()):
            if name not in names:
                folder.remove(name)
        remove_partials(folder, "|".join(map(re.escape, names)))
    gone = path / f"{_NEW_FILES}.{secrets.token_hex(8)}.partial"
    new.rename(gone)
    shutil.rmtree(gone)


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in this block for the same folder."""
    with Folder(path) as folder:
        if folder.handle is not None:
            lock(folder.handle, wait=True)
        yield


def remove_partials(folder: Folder, name: str) -> None:
    """Remove what killed processes have left of files whose name matches a regular expression."""
    partial = re.compile(f"(?:{name}){_PARTIAL}")
    for found in filter(partial.fullmatch, folder.names()):
        with contextlib.suppress(OSError), folder.open(found, os.O_RDWR, "rb+") as file:
            if lock(file.fileno(), wait=False):  # otherwise it is being written
                folder.remove(found)


def _replace(folder: Folder, name: str, put: Callable[[BinaryIO], object]) -> None:
    partial, file = _new_file(folder, name)
    try:
        with file:
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


def _new_file(folder: Folder, name: str) -> tuple[str, BinaryIO]:
    """The name of a new, locked file, and the file."""
    while True:
        partial = f"{name}.{secrets.token_hex(8)}.partial"
        file = folder.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb")
        lock(file.fileno(), wait=True)
        if os.fstat(file.fileno()).st_nlink:
            return partial, file
        file.close()  # another process took it for one that was left, before it was locked


def lock(handle: int, wait: bool, without: bool = False) -> bool:
    """Lock a file; whether this process has the lock now. There may be file systems without locks.

    Args:
        without: the answer on Windows, where nothing is locked.
    """
    if fcntl is None:
        return without
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True

"""Download a file over HTTP: resumable, and checked by its digest before it gets its name."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from slimstart.errors import DataError
from slimstart.io import atomic
from slimstart.io.files import Folder, open_to_read

Progress = Callable[[int, int | None], None]

_TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 18
_SHORT, _MAX_SHORT = 1 << 20, 5  # bytes of a short attempt, and the number of short ones that are allowed
_SLOW, _PATIENCE = 1 << 10, 60.0  # a download ends if it is slower than these bytes per second after this time
_MAX_BYTES = 1 << 30  # of a file; those that we fetch have 170 MB


def fetch(url: str, path: Path, md5: str, progress: Progress | None = None) -> None:
    """Download `url` to `path`.

    Bytes that have arrived are kept in a file `.part`; a later attempt, or a later call, requests only the others. Of
    several processes, one downloads, and the others wait for it.

    Args:
        md5: the digest of the whole file.
        progress: called with the bytes that are downloaded and the bytes of the whole file, None if unknown.

    Raises:
        DataError: the server cannot be reached, or what it sends is not the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.turn(path.parent):  # of several runs that start together, one downloads
            if not path.exists():
                _fetch(url, path, md5, progress)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(f"{url} could not be fetched: {str(error) or type(error).__name__}") from error


def _fetch(url: str, path: Path, md5: str, progress: Progress | None) -> None:
    part = path.with_name(path.name + ".part")
    num_short = 0
    while True:
        before = _size(part)
        try:
            _fetch_rest(url, part, progress)
            break
        except (OSError, http.client.HTTPException):
            brought = _size(part) - before
            num_short += brought < _SHORT
            if brought <= 0 or num_short > _MAX_SHORT:  # an attempt that brought nothing is the last
                raise
    with open_to_read(part) as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        part.unlink()  # resuming it would fail again
        raise DataError(f"{url} gave a file with the MD5 {found}, not {md5}; it was removed: try again")
    part.replace(path)


def _size(part: Path) -> int:
    return part.lstat().st_size if part.exists() else 0


def _opened(part: Path, keep: bool) -> BinaryIO:
    """The partial file, to be written at its end; a link is not followed."""
    with Folder(part.parent) as folder:
        if not keep:
            folder.remove(part.name)
        return folder.open(part.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab")


def _fetch_rest(url: str, part: Path, progress: Progress | None) -> None:
    """Bring `part` to its full size."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing; the digest tells whether it is the file
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0  # a server that does not know ranges sends the whole file again
        total = None if response.length is None else done + response.length
        began, before = time.monotonic(), done
        with _opened(part, keep=done > 0) as file:
            while chunk := response.read1(_CHUNK):  # what has arrived, so that the time is looked at
                file.write(chunk)
                done += len(chunk)
                seconds = time.monotonic() - began
                # Neither is a reason to try at once again.
                if seconds > _PATIENCE and done - before < _SLOW * seconds:
                    raise DataError(f"{url} sent only {done - before:,} bytes in {seconds:.0f} s; try again later")
                if done > _MAX_BYTES:
                    part.unlink()
                    raise DataError(f"{url} sends more than {_MAX_BYTES:,} bytes; they were removed")
                if progress is not None:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done < total:
        raise ConnectionError(
            f"the connection broke after {done:,} of {total:,} bytes; try again to resume the download"
        )

"""Download a file over HTTP: resumable, and checked by its digest before it gets its name."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from slimstart.errors import DataError

Progress = Callable[[int, int | None], None]

_TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 18


def fetch(url: str, path: Path, md5: str, progress: Progress | None = None) -> None:
    """Download `url` to `path`.

    Bytes that have arrived are kept in a file `.part`; a later attempt, or a later call, requests only the others.

    Args:
        md5: the digest of the whole file.
        progress: called with the bytes that are downloaded and the bytes of the whole file, None if unknown.

    Raises:
        DataError: the server cannot be reached, or what it sends is not the file.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            before = _size(part)
            try:
                _fetch_rest(url, part, progress)
                break
            except (OSError, http.client.HTTPException):
                if _size(part) <= before:  # an attempt that brought nothing is the last
                    raise
        with part.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url} could not be fetched: {str(error) or type(error).__name__}") from error
    if found != md5:
        part.unlink()  # resuming it would fail again
        raise DataError(f"{url} gave a file with the MD5 {found}, not {md5}; it was removed: try again")
    part.replace(path)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


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
        length = response.headers["Content-Length"]
        total = None if length is None else done + int(length)
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done < total:
        raise ConnectionError(
            f"the connection broke after {done:,} of {total:,} bytes; try again to resume the download"
        )

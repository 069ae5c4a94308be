"""Read a pickle of plain data without letting it run anything.

A pickle is a program: it names functions and calls them. Here the names in files of CIFAR are replaced by stand-ins
that only store their arguments, and every other name is refused before it is looked up. So a file can make containers,
numbers, strings and arrays of uint8, and nothing else, and no more of them than it has bytes for.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from typing import Any

import numpy as np

from slimstart.errors import DataError

_FEW = 10_000  # operations that any file may have; a batch of CIFAR has one for 600 bytes


class _Type:
    """A stand-in for `numpy.dtype`."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {reprlib.repr(code)}, not uint8")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: a byte has none."""


class _Array:
    """A stand-in for `numpy.ndarray`, and for the function that makes an empty one."""

    value: np.ndarray

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Type, bool, bytes]) -> None:
        _, shape, _, by_columns, content = state
        self.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


_STAND_INS = {
    "numpy.dtype": _Type,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,  # the same since numpy 2
}

# These allocate as many bytes as the file claims, or look things up outside of the file.
_REFUSED = (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.EXT1, pickle.EXT2, pickle.EXT4)


class _Operations(dict[int, Any]):
    """The operations of a pickle; each makes at most a small object, so their number bounds the memory."""

    def __init__(self, most: int) -> None:
        super().__init__(pickle._Unpickler.dispatch)
        for code in _REFUSED:
            del self[code[0]]
        self._left = most

    def __getitem__(self, code: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise pickle.UnpicklingError("it has more operations than data")
        if code not in self:
            raise pickle.UnpicklingError(f"an operation that is not needed for plain data ({bytes([code])!r})")
        return super().__getitem__(code)


# The implementation in Python: that in C allocates what an index or a length claims, 4 GB for a file of 9 bytes.
class _Reader(pickle._Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.dispatch = _Operations(_FEW + len(content) // 16)  # type: ignore[misc]  # of this file
        self._left = 2 * len(content)  # bytes that may be made of text

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        try:
            return _STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {_short(f'{module}.{name}')}, which is not plain data") from None

    def _encode(self, text: str, encoding: str) -> bytes:
        """A stand-in for `_codecs.encode`, through which Python 3 writes bytes that Python 2 can read."""
        if encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError(f"bytes encoded as {reprlib.repr(encoding)}")
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it makes more bytes than it has")
        return text.encode("latin1")


def _short(name: str) -> str:
    return name if len(name) < 100 else f"{name[:100]}..."


def read(content: bytes, source: object) -> dict[str, Any]:
    """The dict that `content` holds, keys as str, arrays of uint8 as such.

    Raises:
        DataError: names `source`; it holds anything else, or is not a whole pickle.
    """
    try:
        found = _Reader(content).load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a dict")
        return {
            key.decode() if isinstance(key, bytes) else key: value.value if isinstance(value, _Array) else value
            for key, value in found.items()
        }
    except MemoryError:
        raise
    # A damaged pickle may raise any exception.
    except Exception as error:
        raise DataError(f"{source} is not a batch of CIFAR, or damaged: {error}; download it again") from error

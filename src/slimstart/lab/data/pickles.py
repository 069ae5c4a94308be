"""Read a pickle of CIFAR without letting it run anything.

The names in files of CIFAR are replaced by stand-ins that only store their arguments. So a file can make containers,
numbers, strings and arrays of uint8, and nothing else, and no more of them than it has bytes for.
"""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from slimstart.errors import DataError
from slimstart.io.plain_pickles import PlainUnpickler

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


_STAND_INS: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _Type,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,  # the same since numpy 2
}


class _Reader(PlainUnpickler):
    def __init__(self, content: bytes) -> None:
        stand_ins = {**_STAND_INS, "_codecs.encode": self._encode}
        super().__init__(content, stand_ins, _FEW + len(content) // 16)
        self._left = 2 * len(content)  # bytes that may be made of text

    def _encode(self, text: str, encoding: str) -> bytes:
        """A stand-in for `_codecs.encode`, through which Python 3 writes bytes that Python 2 can read."""
        if encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError(f"bytes encoded as {reprlib.repr(encoding)}")
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it makes more bytes than it has")
        return text.encode("latin1")


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

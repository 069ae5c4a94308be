"""Read a pickle of plain data without letting it run anything.

A pickle is a program: it names functions and calls them. Here the names in files of CIFAR are replaced by stand-ins
that only store their arguments, and every other name is refused before it is looked up. So a file can make containers,
numbers, strings and arrays of uint8, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from slimstart.errors import DataError


class _Type:
    """A stand-in for `numpy.dtype`."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, not uint8")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: a byte has none."""


class _Array:
    """A stand-in for `numpy.ndarray`, and for the function that makes an empty one."""

    value: np.ndarray

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Type, bool, bytes]) -> None:
        _, shape, _, by_columns, content = state
        self.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


def _encode(text: str, encoding: str) -> bytes:
    """A stand-in for `_codecs.encode`, through which Python 3 writes bytes that Python 2 can read."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


_STAND_INS = {
    "numpy.dtype": _Type,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,  # the same since numpy 2
    "_codecs.encode": _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not plain data") from None


def read(content: bytes, source: object) -> dict[str, Any]:
    """The dict that `content` holds, keys as str, arrays of uint8 as such.

    Raises:
        DataError: names `source`; it holds anything else, or is not a whole pickle.
    """
    try:
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a dict")
        return {
            key.decode() if isinstance(key, bytes) else key: value.value if isinstance(value, _Array) else value
            for key, value in found.items()
        }
    # A damaged pickle may raise any exception.
    except Exception as error:
        raise DataError(f"{source} is not a batch of CIFAR, or damaged: {error}; download it again") from error

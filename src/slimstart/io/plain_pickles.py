"""Read a pickle of plain data without letting it run anything, or make more than it has bytes for.

A pickle is a program: it names functions and calls them. `PlainUnpickler` gives it stand-ins for the few names that a
kind of file needs, and refuses every other name before it is looked up.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

# These allocate as many bytes as the file claims, or look things up outside of the file.
_REFUSED = (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.EXT1, pickle.EXT2, pickle.EXT4)
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_ITEMSIZES = {"UntypedStorage": 1, "BoolStorage": 1, "ByteStorage": 1, "CharStorage": 1, "ShortStorage": 2}
_ITEMSIZES |= {"HalfStorage": 2, "BFloat16Storage": 2, "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8}
_ITEMSIZES |= {"DoubleStorage": 8, "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16}
_KIND = re.compile(r"torch\.(b?float\d+|complex\d+|u?int\d+|bool|float8_\w+)")


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
class PlainUnpickler(pickle._Unpickler):
    """A reader of plain data.

    Args:
        content: the pickle.
        stand_ins: what takes the place of each name.
        max_operations: largest number of operations.
    """

    def __init__(self, content: bytes, stand_ins: Mapping[str, Callable[..., Any]], max_operations: int) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.dispatch = _Operations(max_operations)  # type: ignore[misc]  # of this file
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._stand_ins[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {_short(f'{module}.{name}')}, which is not plain data") from None


class _TensorPickle(PlainUnpickler):
    """A pickle as `torch.save` writes it for plain values and tensors; the tensors are not made."""

    def __init__(self, content: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(content, {}, 16 + len(content))
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _TENSORS:
            return _check_tensor
        if full == "collections.OrderedDict":
            return _empty_state_dict
        if _KIND.fullmatch(full):
            return full
        if module in ("torch", "torch.storage") and name in _ITEMSIZES:
            return _ITEMSIZES[name]
        raise pickle.UnpicklingError(f"it asks for {_short(full)}, which is not plain data")

    def persistent_load(self, pid: Any) -> int:
        """The number of elements of a storage."""
        name, itemsize, key, _, num_elements = pid
        if name != "storage" or type(num_elements) is not int or num_elements * itemsize != self._sizes[key]:
            raise pickle.UnpicklingError("it has data of another size than it says")
        return num_elements


def _check_tensor(num_elements: int, _offset: int, size: tuple[int, ...], *_: object) -> None:
    """Refuse a tensor that is larger than its storage: a copy of it could need any amount of memory."""
    if math.prod(size) > num_elements:
        raise pickle.UnpicklingError("it has a tensor that is larger than its data")


class _StateDict(OrderedDict[Any, Any]):
    """A state dict as modules make it, or the hooks of a tensor."""

    def __setstate__(self, state: Any) -> None:
        """Accept the metadata of a state dict. Many attributes would be copied for every dict that has them."""
        if not isinstance(state, dict) or state.keys() != {"_metadata"}:
            raise pickle.UnpicklingError("it has a dict with attributes")


def _empty_state_dict() -> _StateDict:
    """A state dict before its entries. With arguments this could make copies without end."""
    return _StateDict()


def check_tensors(content: bytes, sizes: Mapping[str, int]) -> None:
    """Refuse the pickle of a PyTorch file that has more than plain values, containers and tensors.

    `torch.load(weights_only=True)` executes no code of a file, but makes a bytearray of any size, copies a container
    again and again, and makes tensors of many kinds. Before PyTorch 2.10 it reads beyond data that is shorter than the
    pickle says (CVE-2026-24747).

    Args:
        content: the pickle.
        sizes: the number of bytes of each storage, by its key.

    Raises:
        pickle.UnpicklingError: it has.
    """
    try:
        _TensorPickle(content, sizes).load()
    except (MemoryError, pickle.UnpicklingError):
        raise
    except Exception as error:  # an odd pickle may raise any exception
        raise pickle.UnpicklingError(f"it is no pickle of plain values: {error}") from error


def _short(name: str) -> str:
    return name if len(name) < 100 else f"{name[:100]}..."

"""Page-locked memory of the host, which a GPU reads and writes by itself, over the bus."""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN = 256  # bytes, to which tensors are placed
PAGE = 4096  # bytes: memory is locked by the page, and no page may be locked twice
PORTABLE_AND_MAPPED = 3  # flags of cudaHostRegister


class PageLocked:
    """Keeps tensors of the host in page-locked memory, for as long as this object and the tensors live.

    PyTorch's own `pin_memory` takes the next power of two, which is up to twice as much as there is; here tensors lie
    close together.

    Args:
        device: that will reach for the tensors; where it is no GPU, nothing is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        weakref.finalize(self, _unlock, self._buffers)

    def take_(self, tensors: Iterable[Tensor]) -> None:
        """See to it that these tensors are in page-locked memory; they stay the same objects."""
        if self._device.type != "cuda":
            return
        loose = [tensor for tensor in tensors if tensor.numel() and not tensor.is_pinned()]
        if not loose:
            return
        unused = [buffer for buffer in self._buffers if buffer.is_unused]  # of state that other state was loaded over
        self._buffers[:] = [buffer for buffer in self._buffers if buffer not in unused]
        _unlock(unused)
        buffer = pack_(loose)
        # Only now, with the old copies given back: locking takes all of the memory at once.
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE_AND_MAPPED)
        if int(status) != 0:
            raise RuntimeError(
                f"{buffer.numel() / 2**30:.3g} GiB of the host's memory could not be page-locked for the GPU (CUDA "
                f"error {int(status)}); is `ulimit -l` too low, or the memory of a container?"
            )
        self._buffers.append(_Buffer(buffer, buffer.data_ptr(), [weakref.ref(tensor) for tensor in loose]))


@dataclass(frozen=True, eq=False)
class _Buffer:
    memory: Tensor
    address: int
    tensors: list[weakref.ref[Tensor]]

    @property
    def is_unused(self) -> bool:
        return all(tensor() is None for tensor in self.tensors)


_waiting: list[_Buffer] = []


def _unlock(buffers: list[_Buffer]) -> None:
    """Now, or later where a graph is being captured, which would break: garbage is collected at any time."""
    _waiting.extend(buffers)
    buffers.clear()
    while _waiting and not torch.cuda.is_current_stream_capturing():
        buffer = _waiting.pop()
        torch.cuda.cudart().cudaHostUnregister(buffer.address)
        del buffer  # and its pages with it, only now


@torch.no_grad()
def pack_(tensors: list[Tensor]) -> Tensor:
    """Move tensors into pages of their own, one after the other, each with its strides; returns these, as bytes.

    Each has a storage of its own there: PyTorch saves and copies whole storages, and whether a tensor `is_pinned` it
    asks of the first byte of its storage.
    """
    starts = [0, *itertools.accumulate(map(num_bytes, tensors))]
    # Shared with processes that are forked: of private pages the parent would get copies, which the GPU does not know.
    pages = mmap.mmap(-1, -(-starts[-1] // PAGE) * PAGE)
    for tensor, start in zip(tensors, starts, strict=False):
        strides = torch.empty_like(tensor, device="meta").stride()  # without gaps, the dimensions in their order
        room = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        tensor.data = room.as_strided(tensor.shape, strides).copy_(tensor)
    return torch.frombuffer(pages, dtype=torch.uint8)


def num_bytes(tensor: Tensor) -> int:
    """What a tensor takes, aligned as the device likes it."""
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN

r"""Moves between dense tensors and narrow ones: `gather` and `scatter_`, for one tensor or for many in one kernel.

A narrow element with coordinates c_d has its dense counterpart at the indices

    i_d = c_d                      along a dimension that is not narrowed,
    i_d = positions_d[c_d]         along a narrowed one, where -1 is padding: an element without a counterpart.

`gather` reads zeros for padding, and `scatter_` does not write it; on all other elements they are inverses.

`Moves` does the same for many tensors at once, with the positions of all of them in one row. Tensors keep their
addresses and strides, positions change in place on the device, and no value is read on the host, so a CUDA graph can
hold a move. On a GPU it is one Triton kernel in each direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.kernels.backend import use_triton

BLOCK = 1024  # narrow elements that a program of the kernel moves at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(dense: Tensor, positions: Mapping[int, Tensor]) -> Tensor:
    """The narrow tensor of a dense one, as a new tensor.

    Args:
        dense: the dense tensor.
        positions: {narrowed dimension: dense index of every narrow position, -1 for padding}.
    """
    if _narrows_both(dense, positions):  # one pass instead of two
        rows, columns = positions[0], positions[1]
        flat = (rows.clamp(min=0)[:, None] * dense.shape[1] + columns.clamp(min=0)).view(-1)
        narrow = dense.reshape(dense.shape[0] * dense.shape[1], -1).index_select(0, flat)
        narrow = narrow.view(rows.numel(), columns.numel(), *dense.shape[2:])
    else:
        narrow = dense
        for dim, index in positions.items():
            narrow = narrow.index_select(dim, index.clamp(min=0))
    for dim, index in positions.items():
        if index.is_meta:
            continue  # only shapes, no values
        padding = (index < 0).nonzero().squeeze(1)
        if padding.numel():
            narrow.index_fill_(dim, padding, 0)
    return narrow if positions else dense.clone()


def scatter_(dense: Tensor, narrow: Tensor, positions: Mapping[int, Tensor]) -> Tensor:
    """Write a narrow tensor into its dense counterpart, in place; padding is not written."""
    filled = {}
    for dim, index in positions.items():
        real = (index >= 0).nonzero().squeeze(1)
        if real.numel() < index.numel():
            narrow, index = narrow.index_select(dim, real), index.index_select(0, real)
        filled[dim] = index
    if not filled:
        return dense.copy_(narrow)
    if len(filled) == 1:
        ((dim, index),) = filled.items()
        return dense.index_copy_(dim, index, narrow)
    if _narrows_both(dense, filled):
        flat = (filled[0][:, None] * dense.shape[1] + filled[1]).view(-1)
        kernel = dense.shape[2:].numel()  # instead of -1, which is ambiguous if all positions are padding
        flat_dense = dense.view(dense.shape[0] * dense.shape[1], kernel)
        flat_dense.index_copy_(0, flat, narrow.reshape(flat.numel(), kernel))
        return dense
    first, last = min(filled), max(filled)
    mesh = tuple(  # dimensions between two narrowed ones are indexed too: torch wants indexed dimensions adjacent
        filled.get(dim, torch.arange(dense.shape[dim], device=dense.device)).view(-1, *[1] * (last - dim))
        for dim in range(first, last + 1)
    )
    dense[(slice(None),) * first + mesh] = narrow
    return dense


def _narrows_both(tensor: Tensor, positions: Mapping[int, Tensor]) -> bool:
    """Whether exactly the first two dimensions of a convolution's weight are narrowed, with contiguous kernels."""
    return positions.keys() == {0, 1} and tensor.dim() > 2 and tensor.is_contiguous()


@dataclass(frozen=True, eq=False)
class Move:
    """One dense tensor and its narrow counterpart, of the same type and on the same device.

    Attributes:
        dense: the dense tensor, with any strides, also 0.
        narrow: the narrow tensor, without gaps, with its dimensions in any memory order.
        starts: {narrowed dimension: start of its positions in the row}.
    """

    dense: Tensor
    narrow: Tensor
    starts: Mapping[int, int]

    def __post_init__(self) -> None:
        dense, narrow = self.dense, self.narrow
        if dense.dtype != narrow.dtype or dense.device != narrow.device or dense.dim() != narrow.dim():
            raise ValueError(
                f"`dense` is {dense.dtype} with {dense.dim()} dimensions on {dense.device}, `narrow` {narrow.dtype} "
                f"with {narrow.dim()} on {narrow.device}; they must be of one kind"
            )
        for dim, (whole, left) in enumerate(zip(dense.shape, narrow.shape, strict=True)):
            if left != whole and dim not in self.starts:
                raise ValueError(
                    f"dimension {dim} of `dense` is {whole} and of `narrow` {left}; only narrowed ones may differ"
                )
        if narrow.numel() != 0 and not narrow.permute(self._order).is_contiguous():
            raise ValueError(f"`narrow` of shape {tuple(narrow.shape)} has strides {narrow.stride()}, with gaps")

    @property
    def _order(self) -> list[int]:
        """Dimensions in memory order, the outermost first."""
        return sorted(range(self.narrow.dim()), key=lambda dim: (-self.narrow.stride()[dim], -self.narrow.shape[dim]))

    def dims(self) -> list[tuple[int, int, int]]:
        """(size, dense stride, start in the row or -1) of every dimension in memory order.

        Neighbouring dimensions that are not narrowed are merged: every dimension costs the kernel a division.
        """
        merged: list[tuple[int, int, int]] = []
        for dim in self._order:
            size, stride, start = self.narrow.shape[dim], self.dense.stride(dim), self.starts.get(dim, -1)
            if size == 1 and start < 0:
                continue
            if merged and start < 0 and merged[-1][2] < 0 and merged[-1][1] == stride * size:
                merged[-1] = (merged[-1][0] * size, stride, -1)
            else:
                merged.append((size, stride, start))
        return merged

    def positions(self, row: Tensor) -> dict[int, Tensor]:
        """The positions of this tensor in the row of all positions."""
        return {dim: row[at : at + self.narrow.shape[dim]].long() for dim, at in self.starts.items()}


class Moves:
    """Moves between several dense and narrow tensors.

    Args:
        moves: pairs of tensors, on one device.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = [move for move in moves if move.narrow.numel()]
        ends = (start + m.narrow.shape[dim] for m in self._moves for dim, start in m.starts.items())
        self._end = max(ends, default=0)
        self._tables: list[_Table] = []
        if self._moves and use_triton(self._moves[0].narrow):
            sizes = sorted({move.narrow.element_size() for move in self._moves})
            self._tables = [_Table([m for m in self._moves if m.narrow.element_size() == size]) for size in sizes]

    @torch.no_grad()
    def gather_(self, row: Tensor) -> None:
        """Fill the narrow tensors from the dense ones.

        Args:
            row: int32, positions of all tensors.
        """
        self._check(row)
        for table in self._tables:
            table.launch("gather", row)
        for move in () if self._tables else self._moves:
            move.narrow.detach().copy_(gather(move.dense.detach(), move.positions(row)))

    @torch.no_grad()
    def scatter_(self, row: Tensor) -> None:
        """Write the narrow tensors into the dense ones; `row` as for `gather_`."""
        self._check(row)
        for table in self._tables:
            table.launch("scatter", row)
        for move in () if self._tables else self._moves:
            scatter_(move.dense.detach(), move.narrow.detach(), move.positions(row))

    def _check(self, row: Tensor) -> None:
        if row.numel() < self._end or not row.is_contiguous():  # the kernel does not check bounds
            raise ValueError(f"`row` has shape {tuple(row.shape)}; these moves need {self._end} positions in a row")


class _Table:
    """Moves of elements of one size, as tables for the kernel: a row per tensor, and its blocks of elements.

    Addresses are data in the table, so one launch serves any number of tensors. Numbers are moved as integers of their
    size, whatever they mean.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        dims = [move.dims() for move in moves]
        self._num_dims = max(1, *map(len, dims))
        rows, counts = [], []
        for move, own in zip(moves, dims, strict=True):
            count = math.prod(size for size, _, _ in own)
            if count > 2**31 - BLOCK:
                raise ValueError(f"`narrow` has {count} elements; one tensor can have 2^31 - {BLOCK} at most")
            padded = [(1, 0, -1)] * (self._num_dims - len(own)) + own
            rows.append([move.narrow.data_ptr(), move.dense.data_ptr(), count, *(n for dim in padded for n in dim)])
            counts.append(count)
        blocks = -(-torch.tensor(counts) // BLOCK)  # per tensor
        number = torch.repeat_interleave(torch.arange(len(moves)), blocks)
        first = (torch.arange(number.numel()) - (torch.cumsum(blocks, 0) - blocks)[number]) * BLOCK
        self._device = moves[0].narrow.device
        self._rows = _upload(torch.tensor(rows, dtype=torch.int64), self._device)
        self._blocks = _upload(torch.stack([number, first], dim=1).int(), self._device)
        self._num_programs = number.numel()
        self._kind = torch.zeros(1, dtype=_INTEGERS[moves[0].narrow.element_size()], device=self._device)

    def launch(self, way: str, row: Tensor) -> None:
        from slimstart.kernels import moves_triton

        kernel = moves_triton.gather if way == "gather" else moves_triton.scatter
        with torch.cuda.device_of(row):
            kernel[(self._num_programs,)](
                self._kind, self._blocks, self._rows, row, len(self._blocks), self._num_dims, BLOCK
            )


def _upload(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to a device without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)

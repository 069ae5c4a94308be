"""Moves: numbers between many dense tensors and narrow ones, all in one kernel each way.

A narrow element with coordinates c_d in its tensor has its dense counterpart at the indices

    i_d = c_d                        along a dimension that stays whole,
    i_d = places[start_d + c_d]      along one that is cut, where -1 means that there is none.

Tensors stay where they are and keep their strides; `places` changes between calls, in place and on the device, and no
value is asked for on the host, so that a CUDA graph can hold a move. `gather_` and `scatter_` are inverse to each other
on the elements that have a counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.kernels.backend import use_triton

BLOCK = 1024  # narrow elements that one program of the kernel moves
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Move:
    """One dense tensor and its narrow counterpart, of the same type on the same device.

    Attributes:
        dense: any strides, also 0.
        narrow: without gaps, its dimensions in any order in memory.
        starts: {dimension: where its entries begin in `places`}, for the dimensions that are cut.
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
                    f"dimension {dim} of `dense` is {whole} and of `narrow` {left}; only one that is cut may differ"
                )
        if narrow.numel() != 0 and not narrow.permute(self._order).is_contiguous():
            raise ValueError(f"`narrow` of shape {tuple(narrow.shape)} has strides {narrow.stride()}, with gaps")

    @property
    def _order(self) -> list[int]:
        """Dimensions as they lie in memory, the outermost first."""
        return sorted(range(self.narrow.dim()), key=lambda dim: (-self.narrow.stride()[dim], -self.narrow.shape[dim]))

    def dims(self) -> list[tuple[int, int, int]]:
        """(size, dense stride, start in `places` or -1) of every dimension in memory; whole neighbours are one."""
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

    @torch.no_grad()
    def gather_(self, places: Tensor) -> None:
        """One tensor alone, by plain operations."""
        value = self.dense.detach()
        for dim, start in self.starts.items():
            index = places[start : start + self.narrow.shape[dim]].long()
            value = value.index_select(dim, index.clamp(min=0))
            value.index_fill_(dim, (index < 0).nonzero().squeeze(1), 0)
        self.narrow.detach().copy_(value)

    @torch.no_grad()
    def scatter_(self, places: Tensor) -> None:
        value, index = self.narrow.detach(), []
        for dim, size in enumerate(self.narrow.shape):
            here = torch.arange(size, device=places.device)
            if dim in self.starts:
                there = places[self.starts[dim] : self.starts[dim] + size].long()
                filled = (there >= 0).nonzero().squeeze(1)
                value, here = value.index_select(dim, filled), there[filled]
            index.append(here.view(-1, *[1] * (self.narrow.dim() - 1 - dim)))
        self.dense.detach()[tuple(index) if index else ...] = value


class Moves:
    """Moves that belong together."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = [move for move in moves if move.narrow.numel()]
        ends = (start + m.narrow.shape[dim] for m in self._moves for dim, start in m.starts.items())
        self._end = max(ends, default=0)
        self._tables: list[_Table] = []
        if self._moves and use_triton(self._moves[0].narrow):
            sizes = sorted({move.narrow.element_size() for move in self._moves})
            self._tables = [_Table([m for m in self._moves if m.narrow.element_size() == size]) for size in sizes]

    def gather_(self, places: Tensor) -> None:
        """Fill the narrow tensors; elements without a counterpart become 0."""
        self._run("gather", places)

    def scatter_(self, places: Tensor) -> None:
        """Write the narrow tensors over the dense ones; what has no narrow counterpart there is left alone."""
        self._run("scatter", places)

    def _run(self, way: str, places: Tensor) -> None:
        if places.numel() < self._end or not places.is_contiguous():  # the kernel would read what is not there
            raise ValueError(f"`places` has shape {tuple(places.shape)}; these moves need {self._end} in a row")
        if self._tables:
            for table in self._tables:
                table.launch(way, places)
        else:
            for move in self._moves:
                (move.gather_ if way == "gather" else move.scatter_)(places)


class _Table:
    """Moves of numbers of one size, as the kernel reads them: addresses and dimensions by row, blocks of elements."""

    def __init__(self, moves: Sequence[Move]) -> None:
        dims = [move.dims() for move in moves]
        self._num_dims = max(1, *map(len, dims))
        rows, blocks = [], []
        for number, (move, own) in enumerate(zip(moves, dims, strict=True)):
            count = math.prod(size for size, _, _ in own)
            if count > 2**31 - BLOCK:
                raise ValueError(f"`narrow` has {count} elements; one tensor can have 2^31 - {BLOCK} at most")
            padded = [(1, 0, -1)] * (self._num_dims - len(own)) + own
            rows.append([move.narrow.data_ptr(), move.dense.data_ptr(), count, *(n for dim in padded for n in dim)])
            blocks += [(number, first) for first in range(0, count, BLOCK)]
        self._device = moves[0].narrow.device
        self._rows = torch.tensor(rows, dtype=torch.int64).to(self._device)
        self._blocks = torch.tensor(blocks, dtype=torch.int32).to(self._device)
        self._kind = torch.zeros(1, dtype=_INTEGERS[moves[0].narrow.element_size()], device=self._device)

    def launch(self, way: str, places: Tensor) -> None:
        from slimstart.kernels import moves_triton

        kernel = moves_triton.gather if way == "gather" else moves_triton.scatter
        with torch.cuda.device_of(places):
            kernel[(len(self._blocks),)](self._kind, self._blocks, self._rows, places, self._num_dims, BLOCK)

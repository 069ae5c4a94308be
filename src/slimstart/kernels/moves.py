"""Moves: numbers between many dense tensors and narrow ones, all in one kernel each way.

A narrow element with coordinates c_d in its tensor has its dense counterpart at the indices

    i_d = c_d                        along a dimension that stays whole,
    i_d = places[start_d + c_d]      along one that is cut, where -1 means that there is none.

Tensors stay where they are and keep their strides; `places` changes between calls, in place and on the device, and no
value is asked for on the host, so that a CUDA graph can hold a move. `gather_` and `scatter_` are inverse to each other
on the elements that have a counterpart.

Dense tensors may also lie in page-locked memory of the host, where a GPU reaches them itself: every element that moves
then crosses the bus, so both ways take `but`, which names elements to leave alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimstart.kernels.backend import use_triton

BLOCK = 1024  # narrow elements that one program of the kernel moves at a time
CROSSING = 96  # programs that keep the bus busy, and leave the multiprocessors to others
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Move:
    """One dense tensor and its narrow counterpart, of the same type.

    Attributes:
        dense: any strides, also 0; on the device of `narrow`, or on the host where that is a GPU.
        narrow: without gaps, its dimensions in any order in memory.
        starts: {dimension: where its entries begin in `places`}, for the dimensions that are cut.
    """

    dense: Tensor
    narrow: Tensor
    starts: Mapping[int, int]

    def __post_init__(self) -> None:
        dense, narrow = self.dense, self.narrow
        apart = dense.device != narrow.device and not (narrow.is_cuda and dense.device.type == "cpu")
        if dense.dtype != narrow.dtype or apart or dense.dim() != narrow.dim():
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

    @property
    def reachable(self) -> bool:
        """Whether a kernel on the device of `narrow` can read and write `dense`."""
        return self.dense.device == self.narrow.device or self.dense.is_pinned()

    @torch.no_grad()
    def gather_(self, places: Tensor, but: Tensor | None = None) -> None:
        """One tensor alone, by plain operations."""
        for box in self._boxes(places, but):
            value = self.dense.detach()
            for dim, (_, there) in box.items():
                there = there.to(value.device)
                value = value.index_select(dim, there.clamp(min=0))
                value.index_fill_(dim, (there < 0).nonzero().squeeze(1), 0)
            narrow = self.narrow.detach()
            if but is None:
                narrow.copy_(value)
            else:
                narrow[_mesh(narrow, {dim: here for dim, (here, _) in box.items()})] = value.to(narrow.device)

    @torch.no_grad()
    def scatter_(self, places: Tensor, but: Tensor | None = None) -> None:
        for box in self._boxes(places, but):
            value, index = self.narrow.detach(), {}
            for dim, (here, there) in box.items():
                filled = there >= 0
                value, index[dim] = value.index_select(dim, here[filled]), there[filled]
            dense = self.dense.detach()
            dense[_mesh(dense, index)] = value.to(dense.device)

    def _boxes(self, places: Tensor, but: Tensor | None) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
        """{dimension that is cut: (coordinates, indices of the dense counterparts)} of boxes that hold what moves."""
        box = {dim: torch.arange(self.narrow.shape[dim], device=places.device) for dim in self.starts}
        if but is None:
            yield self._located(box, places)
            return
        for dim, start in self.starts.items():  # what is left alone is a box, and the rest are as many as are cut
            alone = but[start : start + self.narrow.shape[dim]] >= 0
            yield self._located({**box, dim: (~alone).nonzero().squeeze(1)}, places)
            box[dim] = alone.nonzero().squeeze(1)

    def _located(self, box: dict[int, Tensor], places: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        return {dim: (here, places[self.starts[dim] + here].long()) for dim, here in box.items()}


def _mesh(tensor: Tensor, index: Mapping[int, Tensor]) -> Any:
    """What indexes a tensor along some of its dimensions at once."""
    found = []
    for dim, size in enumerate(tensor.shape):
        here = index[dim].to(tensor.device) if dim in index else torch.arange(size, device=tensor.device)
        found.append(here.view(-1, *[1] * (tensor.dim() - 1 - dim)))
    return tuple(found) if found else ...


class Moves:
    """Moves that belong together."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = [move for move in moves if move.narrow.numel()]
        ends = (start + m.narrow.shape[dim] for m in self._moves for dim, start in m.starts.items())
        self._end = max(ends, default=0)
        self._tables: list[_Table] = []
        if self._moves and use_triton(self._moves[0].narrow) and all(move.reachable for move in self._moves):
            sizes = sorted({move.narrow.element_size() for move in self._moves})
            self._tables = [_Table([m for m in self._moves if m.narrow.element_size() == size]) for size in sizes]

    def gather_(self, places: Tensor, but: Tensor | None = None) -> None:
        """Fill the narrow tensors; elements without a counterpart become 0.

        Args:
            but: like `places`; an element that has an entry of at least 0 along every dimension that is cut is left
                alone, and so are tensors of which none is cut.
        """
        self._run("gather", places, but)

    def scatter_(self, places: Tensor, but: Tensor | None = None) -> None:
        """Write the narrow tensors over the dense ones; what has no narrow counterpart there is left alone.

        Args:
            but: as for `gather_`.
        """
        self._run("scatter", places, but)

    def _run(self, way: str, places: Tensor, but: Tensor | None) -> None:
        for name, one in (("places", places), ("but", but)):
            # The kernel would read what is not there.
            if one is not None and (one.numel() < self._end or not one.is_contiguous()):
                raise ValueError(f"`{name}` has shape {tuple(one.shape)}; these moves need {self._end} in a row")
        if self._tables:
            for table in self._tables:
                table.launch(way, places, but)
        else:
            for move in self._moves:
                (move.gather_ if way == "gather" else move.scatter_)(places, but)


class _Table:
    """Moves of numbers of one size, as the kernel reads them: addresses and dimensions by row, blocks of elements."""

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
        blocks = -(-torch.tensor(counts) // BLOCK)  # of each tensor
        number = torch.repeat_interleave(torch.arange(len(moves)), blocks)
        first = (torch.arange(number.numel()) - (torch.cumsum(blocks, 0) - blocks)[number]) * BLOCK
        self._device = moves[0].narrow.device
        self._rows = _upload(torch.tensor(rows, dtype=torch.int64), self._device)
        self._blocks = _upload(torch.stack([number, first], dim=1).int(), self._device)
        crosses = any(move.dense.device != self._device for move in moves)
        self._num_programs = min(number.numel(), CROSSING) if crosses else number.numel()
        self._kind = torch.zeros(1, dtype=_INTEGERS[moves[0].narrow.element_size()], device=self._device)

    def launch(self, way: str, places: Tensor, but: Tensor | None) -> None:
        from slimstart.kernels import moves_triton

        kernel = moves_triton.gather if way == "gather" else moves_triton.scatter
        with torch.cuda.device_of(places):
            kernel[(self._num_programs,)](
                self._kind, self._blocks, self._rows, places, but, len(self._blocks), self._num_dims, BLOCK
            )


def _upload(table: Tensor, device: torch.device) -> Tensor:
    """To a device, without waiting for what it does."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)

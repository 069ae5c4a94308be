"""From one draw to the next when the dense model is on the other side of a bus: only what changes crosses it.

Entries of the present network that the next one lacks *leave*: they go down to the dense model. Entries that only the
next one has *enter*: they come up. What both have *stays*: it moves on the device. Entries that enter rest in the dense
model while the present network is trained, so they can be fetched ahead; those that leave can arrive late.

All channels of all axes have their slots in one row; `places` holds, for every slot, the dense index of the channel
that sits there, or -1 (`slimstart.kernels.Moves` moves tensors by it).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slimstart.graph import ChannelGraph, Selection
from slimstart.kernels import Move, Moves
from slimstart.narrow.page_locked import num_bytes


class Row(Protocol):
    """How the slots of all axes lie in a row; `Seating` says what the attributes are."""

    @property
    def start(self) -> Sequence[int]: ...
    @property
    def axis(self) -> Tensor: ...
    @property
    def local(self) -> Tensor: ...
    @property
    def first(self) -> Tensor: ...
    @property
    def num_positions(self) -> int: ...


class DenseRow:
    """As many slots as an axis has channels in the dense model; a narrow network fills the first of them."""

    def __init__(self, graph: ChannelGraph) -> None:
        lengths = [axis.numel() for axis in graph.axes]
        self.start = [sum(lengths[:i]) for i in range(len(lengths))]
        self.num_positions = sum(lengths)
        self.axis = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        self.first = torch.tensor(self.start, dtype=torch.int64)[self.axis]
        self.local = (torch.arange(self.num_positions) - self.first).int()
        self._events = torch.cat([*graph.axes, torch.zeros(0, dtype=torch.int64)])

    def places(self, selection: Selection) -> Tensor:
        """(num_positions,) int32, on the host."""
        present = selection.happens[self._events]
        before = torch.cumsum(present, 0) - present.long()
        slot = self.first + before - before[self.first]
        places = torch.full((self.num_positions,), -1, dtype=torch.int32)
        places[slot[present]] = self.local[present]
        return places


def counterparts(row: Row, mine: Tensor, its: Tensor) -> Tensor:
    """For every slot, where in its axis the channel of `mine` sits in `its`; -1 where it does not. On the device."""
    seat = torch.full((row.num_positions + 1,), -1, dtype=torch.int32, device=its.device)
    seat.scatter_(0, torch.where(its >= 0, row.first + its, row.num_positions), row.local)
    return torch.where(mine >= 0, seat[row.first + mine.clamp(min=0)], -1)


@dataclass(frozen=True)
class Route:
    """Between two draws.

    Attributes:
        old, new: places.
        across: for every slot of the old draw, its slot within the same axis of the new one, or -1.
        back: the other way round.
    """

    old: Tensor
    new: Tensor
    across: Tensor
    back: Tensor

    @classmethod
    def between(cls, row: Row, old: Tensor, new: Tensor) -> Route:
        return cls(old, new, counterparts(row, old, new), counterparts(row, new, old))

    def copy_(self, other: Route) -> None:
        for name in ("old", "new", "across", "back"):
            getattr(self, name).copy_(getattr(other, name))

    @property
    def nowhere(self) -> Route:
        """By which nothing moves, of tensors that are cut: for kernels to be built before a graph is captured."""
        none = torch.full_like(self.old, -1)
        return Route(none, none, none, torch.zeros_like(none))

    def clone(self) -> Route:
        return Route(self.old.clone(), self.new.clone(), self.across.clone(), self.back.clone())

    def to(self, device: torch.device) -> Route:
        if device.type == "cpu":
            return self
        rows = torch.stack([self.old, self.new, self.across, self.back]).pin_memory().to(device, non_blocking=True)
        return Route(*rows.unbind())


class Exchange:
    """Narrow tensors of one draw become those of another.

    Args:
        tensors: (dense, old, new, starts) each; `starts` as in `Move`.
    """

    def __init__(self, tensors: Sequence[tuple[Tensor, Tensor, Tensor, Mapping[int, int]]]) -> None:
        self._tensors = tensors
        # All tables are made here: to make one while a CUDA graph is captured is forbidden.
        self._with_new = Moves([Move(dense, new, starts) for dense, _, new, starts in tensors])
        self._with_old = Moves([Move(dense, old, starts) for dense, old, _, starts in tensors])
        self._between = Moves([Move(new, old, starts) for _, old, new, starts in tensors])

    @property
    def old(self) -> list[Tensor]:
        return [old for _, old, _, _ in self._tensors]

    def enter(self, route: Route) -> None:
        """Fetch what only the new draw has."""
        self._with_new.gather_(route.new, but=route.back)

    def stay(self, route: Route) -> None:
        """Move what both have, on the device."""
        self._between.scatter_(route.across)

    def leave(self, route: Route) -> None:
        """Bring home what only the old draw has."""
        self._with_old.scatter_(route.old, but=route.across)

    def swap(self, scratch: Tensor) -> None:
        """Exchange the contents of old and new tensors, which have the same shapes; then `leave_swapped`.

        Args:
            scratch: bytes, at least as many as the largest tensor has.
        """
        for _, old, new, _ in self._tensors:
            old, kept = old.detach(), within(scratch, 0, old)
            kept.copy_(old)
            old.copy_(new)
            new.copy_(kept)

    def leave_swapped(self, route: Route) -> None:
        self._with_new.scatter_(route.old, but=route.across)


class Turnover:
    """The same without a second set of tensors: as many at a time as a scratch can hold a copy of.

    Nothing of it can be done ahead or later.

    Args:
        tensors: (dense, narrow, starts) each.
        scratch: bytes, at least as many as the largest tensor has.
    """

    def __init__(self, tensors: Sequence[tuple[Tensor, Tensor, Mapping[int, int]]], scratch: Tensor) -> None:
        self._parts: list[tuple[list[tuple[Tensor, Tensor]], Exchange]] = []
        part: list[tuple[Tensor, Tensor, Tensor, Mapping[int, int]]] = []
        end = 0
        for dense, narrow, starts in tensors:
            if end + num_bytes(narrow) > scratch.numel():
                self._close(part)
                part, end = [], 0
            part.append((dense, within(scratch, end, narrow), narrow.detach(), starts))
            end += num_bytes(narrow)
        self._close(part)

    def _close(self, part: list[tuple[Tensor, Tensor, Tensor, Mapping[int, int]]]) -> None:
        if part:
            self._parts.append(([(copy, narrow) for _, copy, narrow, _ in part], Exchange(part)))

    def __call__(self, route: Route) -> None:
        for tensors, exchange in self._parts:
            for copy, narrow in tensors:
                copy.copy_(narrow)
            exchange.enter(route)
            exchange.stay(route)
            exchange.leave(route)


def within(scratch: Tensor, start: int, like: Tensor) -> Tensor:
    """Room in a scratch (bytes) for a tensor like that one, which has no gaps."""
    room = scratch[start : start + like.numel() * like.element_size()].view(like.dtype)
    return room.as_strided(like.shape, like.stride(), room.storage_offset())


class Tally:
    """Counts the bytes of some tensors that cross the bus.

    Args:
        row: of the slots.
        tensors: (dense, {dimension that is cut: axis}) each.
    """

    def __init__(self, row: Row, tensors: Sequence[tuple[Tensor, Mapping[int, int]]]) -> None:
        self._row, self._num_axes = row, len(row.start)
        most = max((len(cuts) for _, cuts in tensors), default=0)
        axes, sizes = [], []
        for dense, cuts in tensors:
            axes.append([*cuts.values(), *[self._num_axes] * (most - len(cuts))])
            whole = (size for dim, size in enumerate(dense.shape) if dim not in cuts)
            sizes.append(dense.element_size() * math.prod(whole))
        self._axes = torch.tensor(axes, dtype=torch.int64).view(len(tensors), most).to(row.axis.device)
        self._sizes = torch.tensor(sizes, dtype=torch.int64).to(row.axis.device)

    def __call__(self, places: Tensor, but: Tensor | None = None) -> Tensor:
        """int64: bytes of these places, without those of channels that have a counterpart (`but` is at least 0)."""
        moved = self._entries(places >= 0)
        if but is not None:
            moved = moved - self._entries(but >= 0)
        return (self._sizes * moved).sum()

    def _entries(self, there: Tensor) -> Tensor:
        counts = torch.ones(self._num_axes + 1, dtype=torch.int64, device=there.device)
        counts[: self._num_axes] = 0
        return counts.index_add_(0, self._row.axis, there.long())[self._axes].prod(1)


class Beside:
    """A stream beside the current one, for what crosses the bus. On a CPU all happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is launched within runs behind all that the current stream has been given, and beside what comes.

        Memory that is taken within is given to others only here, so whatever lies there can be forgotten at any time,
        as long as the current stream has been given all that uses it. What was taken elsewhere must live until the next
        `join`, or be kept.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """These may be forgotten, too: their memory is given to nobody before what was launched has run."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def finish(self) -> None:
        """Let the host wait, also for the current stream: whatever went down has arrived."""
        if self._stream is not None:
            self.join()
            torch.cuda.current_stream(self._stream.device).synchronize()
